"""`fit` and `predict` that are asked to stop, in process: exit codes, what is saved, what is left in the folder."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcomes import names
from tiers import FULL, cases

from radixtrain.__main__ import main
from radixtrain.training.fault_tolerance import signals as requests_module
from radixtrain.training.module import RadixModule

Arguments = Callable[..., list[str]]
CODES = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`at_step(3, act)`: call it within the third training step."""

    def register(number: int, act: Callable[[], Any], name: str = "training_step") -> None:
        original, count = getattr(RadixModule, name), [0]

        def step(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                act()
            return original(*arguments)

        monkeypatch.setattr(RadixModule, name, step)

    return register


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), cases(CODES, CODES[:1]))
def test_a_signal_saves(
    arguments: Arguments, at_step: Any, tmp_path: Path, capsys: Any, number: signal.Signals, code: int
) -> None:
    at_step(2, send(number))
    assert main(arguments(trainer__max_steps=4)) == code
    message = f"stopped by {number.name} after step 2, which is saved; resume with --ckpt_path"
    assert message in capsys.readouterr().err
    out = tmp_path / "out"
    assert names(out / "checkpoints") == ["last", "step=2"] and not [*out.glob(".*[!s]")]


def test_files_save_and_stop(arguments: Arguments, at_step: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests_module, "POLL_SECONDS", 0.0)
    out = tmp_path / "out"
    at_step(2, (out / "save").touch)
    at_step(4, (out / "stop").touch)
    assert main(arguments(trainer__max_steps=9)) == 130
    assert names(out / "checkpoints") == ["last", "step=2", "step=4"]
    assert not (out / "save").exists() and not (out / "stop").exists()


@FULL
def test_overwrite_keeps_the_old_run_under_another_name(arguments: Arguments, at_step: Any, tmp_path: Path) -> None:
    """From when training begins. What is stopped before it has saved anything is no run to keep."""
    out = tmp_path / "out"
    assert main(arguments(trainer__max_steps=2)) == 0
    (out / "notes.txt").write_text("mine")
    before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(arguments(trainer__max_steps=3)) == 1
    assert main(arguments(trainer__max_steps=3, overwrite=True, data__train_file=tmp_path / "absent.jsonl")) == 1
    assert not (tmp_path / "out.1").exists()
    at_step(1, send(signal.SIGTERM), "on_train_start")
    assert main(arguments(trainer__max_steps=3, overwrite=True)) == 143
    assert main(arguments(trainer__max_steps=3, overwrite=True)) == 0
    earlier = tmp_path / "out.1"
    assert {path.relative_to(earlier): path.read_bytes() for path in earlier.rglob("*") if path.is_file()} == before
    assert names(out / "checkpoints") == ["last", "step=3"] and not (tmp_path / "out.2").exists()
    assert main(arguments(output_dir=earlier, trainer__max_steps=3, ckpt_path="last")) == 0
    assert names(earlier / "checkpoints") == ["last", "step=2", "step=3"]


@FULL
def test_predict_that_is_stopped_leaves_nothing(
    arguments: Arguments, at_step: Any, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    at_step(2, send(signal.SIGTERM), "predict_step")
    assert main(arguments("predict", data__predict_file=shop / "validation.jsonl", data__batch_size=2)) == 143
    assert "stopped by SIGTERM; nothing was saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").glob("*predictions*")]


@FULL
def test_a_killed_worker(arguments: Arguments, at_step: Any, tmp_path: Path, capsys: Any) -> None:
    from multiprocessing import active_children

    def kill() -> None:
        worker = active_children()[0]
        worker.kill()
        worker.join()

    at_step(3, kill)
    flags = {"data__dataloader_num_workers": 1, "save_every_steps": 1, "trainer__max_epochs": 20}
    assert main(arguments(**flags)) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: a DataLoader worker") and "The last checkpoint is" in message
