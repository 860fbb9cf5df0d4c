"""`fit` and `predict` that are asked to stop, in process: exit codes, what is saved, what is left in the folder."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.training.module import RadixModule
from radixtrain.training.survival import requests as requests_module
from radixtrain.training.survival.folder_lock import locked

Arguments = Callable[..., list[str]]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`at_step(3, act)`: call it within the third training step."""

    def register(
        number: int,
        act: Callable[[], Any],
        name: str = "training_step",
        patch: pytest.MonkeyPatch = monkeypatch,
    ) -> None:
        original, count = getattr(RadixModule, name), [0]

        def step(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                act()
            return original(*arguments)

        patch.setattr(RadixModule, name, step)

    return register


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=["TERM", "HUP", "INT"]
)
def test_a_signal_saves(
    arguments: Arguments, at_step: Any, tmp_path: Path, capsys: Any, number: signal.Signals, code: int
) -> None:
    at_step(2, send(number))
    assert main(arguments(trainer__max_steps=4)) == code
    message = f"stopped by {number.name} after step 2, which is saved; go on with --ckpt_path"
    assert message in capsys.readouterr().err
    out = tmp_path / "out"
    assert left(out / "checkpoints") == ["last", "step=2"] and not [*out.glob(".*")]


def test_files_save_and_stop(arguments: Arguments, at_step: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests_module, "POLL_SECONDS", 0.0)
    out = tmp_path / "out"
    at_step(2, (out / "save").touch)
    at_step(4, (out / "stop").touch)
    assert main(arguments(trainer__max_steps=9)) == 130
    assert left(out / "checkpoints") == ["last", "step=2", "step=4"]
    assert not (out / "save").exists() and not (out / "stop").exists()


def test_slurm_requeues_and_the_restarted_job_goes_on(
    arguments: Arguments, at_step: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    variables = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_step(2, send(signal.SIGUSR1), patch=patch)
        assert main(arguments(trainer__max_steps=4)) == 138
    assert (tmp_path / "asked").read_text() == "requeue 41\n"
    assert main(arguments(trainer__max_steps=4)) == 1  # not restarted: another run is in the folder
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    steps: list[int] = []
    at_step(1, lambda: steps.append(1))
    at_step(3, lambda: steps.append(3))
    assert main(arguments(trainer__max_steps=4)) == 0
    assert "step=4" in left(out / "checkpoints") and steps == [1]  # of four, two were left


def test_a_leftover_of_lightning_is_not_taken(
    arguments: Arguments, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for name, value in {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "hpc_ckpt_1.ckpt").write_bytes(b"not even a checkpoint")
    assert main(arguments(trainer__max_steps=1)) == 1
    assert "holds another run (hpc_ckpt_1.ckpt)" in capsys.readouterr().err
    assert main(arguments(trainer__max_steps=1, overwrite=True)) == 0
    assert "hpc_ckpt_1.ckpt" not in left(tmp_path / "out")


def test_overwrite_keeps_the_old_run_until_the_first_checkpoint(
    arguments: Arguments, at_step: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(arguments(trainer__max_steps=2)) == 0
    (out / "notes.txt").write_text("mine")
    before = {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(arguments(trainer__max_steps=3)) == 1
    at_step(1, send(signal.SIGTERM), "on_train_start")
    assert main(arguments(trainer__max_steps=3, overwrite=True)) == 143
    after = {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert after == before
    assert main(arguments(trainer__max_steps=3, overwrite=True)) == 0
    assert left(out / "checkpoints") == ["last", "step=3"] and (out / "notes.txt").is_file()
    assert left(out / "logs") == ["version_0"] and not [*out.glob(".*")]


def test_fast_dev_run_writes_nothing(arguments: Arguments, tmp_path: Path) -> None:
    assert main(arguments(trainer__fast_dev_run=True)) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_a_url_is_no_folder(arguments: Arguments, tmp_path: Path, monkeypatch: Any, capsys: Any, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments(command, output_dir="s3://bucket/run")) == 1
    assert "error: output_dir s3://bucket/run: s3 is not supported; name a local folder" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3")]


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "report"])
def test_a_folder_in_use(arguments: Arguments, tmp_path: Path, capsys: Any, command: str) -> None:
    with locked(tmp_path / "out", "fit"):
        assert main(arguments(command)) == 1
        assert left(tmp_path / "out") == [".lock", ".model.lock"]
    assert f"error: {tmp_path / 'out'} is in use by" in capsys.readouterr().err


def test_copies_are_refused(arguments: Arguments, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(arguments()) == 1
    assert "error: WORLD_SIZE=2: a launcher started 2 copies" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_predict_that_is_stopped_leaves_nothing(
    arguments: Arguments, at_step: Any, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    at_step(2, send(signal.SIGTERM), "predict_step")
    assert main(arguments("predict", data__predict_file=shop / "validation.jsonl", data__batch_size=2)) == 143
    assert "stopped by SIGTERM; nothing was saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").glob("*predictions*")]


def test_a_killed_worker(arguments: Arguments, at_step: Any, tmp_path: Path, capsys: Any) -> None:
    from multiprocessing import active_children

    def kill() -> None:
        os.kill(active_children()[0].pid, signal.SIGKILL)
        time.sleep(0.2)

    at_step(3, kill)
    flags = {"data__dataloader_num_workers": 1, "save_every_steps": 1, "trainer__max_epochs": 20}
    assert main(arguments(**flags)) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: a DataLoader worker") and "The last checkpoint is" in message


def test_sigterm_to_the_group_with_workers(arguments: Arguments, start: Callable[..., Any], tmp_path: Path) -> None:
    """As `timeout` and schedulers send it, to a process of its own."""
    run = start(arguments(data__dataloader_num_workers=2, trainer__max_epochs=100_000))
    first = tmp_path / "out" / "checkpoints" / "last"  # of the first epoch
    until = time.monotonic() + 120
    while not first.exists() and run.is_running and time.monotonic() < until:
        time.sleep(0.1)
    run.send_group(signal.SIGTERM)
    run.send_group(signal.SIGTERM)  # `timeout` sends it twice
    assert run.wait(60) == 143, run.said()
    assert "which is saved; go on with --ckpt_path" in run.error()
    assert list((tmp_path / "out" / "checkpoints").glob("step=*"))
    run.wait_for_workers()
