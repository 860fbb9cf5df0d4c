"""Signals and jobs of SLURM: what is requested, and what `fit` and `predict` do then."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.errors import Stopped
from radixtrain.training.fault_tolerance import signals as module
from radixtrain.training.fault_tolerance.signals import HANDLED, Requests, Stop
from radixtrain.training.module import RadixModule
from tests.support import FULL
from tests.support.runs import names


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not in a SLURM job; signals as they were afterwards."""
    for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "JOB_NAME", "RESTART_COUNT"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; tests add to the only entry."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_after_training_the_message_says_how_to_get_the_model(tmp_path: Path) -> None:
    message = "after the last step; --ckpt_path last writes the model"
    with pytest.raises(Stopped, match=message), Requests() as requests:
        with requests.deferred():
            pass
        send(signal.SIGTERM)


@pytest.mark.parametrize("is_early", [False, True])
def test_while_answers_are_generated_it_raises_at_once(tmp_path: Path, is_early: bool) -> None:
    """Also if it came just before."""
    said = "stopped by SIGTERM while answers were generated; what was trained is saved"
    with pytest.raises(Stopped, match=said), Requests() as requests, requests.deferred():
        if is_early:
            send(signal.SIGTERM)
        with requests.at_once():
            send(signal.SIGTERM)
            pytest.fail("it went on")


class TestSlurm:
    @pytest.fixture(autouse=True)
    def job(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        asked: list[str] = []
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setattr(module, "requeue", lambda: asked.append("requeue"))
        return asked

    @pytest.mark.parametrize(
        ("number", "error", "asked"),
        [
            (signal.SIGUSR1, Stopped("saved", 138), ["requeue"]),  # what the saver raises
            (signal.SIGUSR2, Stopped("saved", 138), ["requeue"]),
            (signal.SIGUSR1, OSError("no room"), []),
            (signal.SIGTERM, Stopped("saved", 143), []),
        ],
    )
    def test_only_usr1_that_is_saved_requeues(
        self, tmp_path: Path, job: list[str], number: int, error: BaseException, asked: list[str]
    ) -> None:
        with pytest.raises(type(error)), Requests() as requests, requests.deferred():
            send(number)
            assert requests.stop is not None and not requests.save
            raise error
        assert job == asked

    def test_sigterm_at_the_time_limit_does_not_end_the_save(
        self, tmp_path: Path, job: list[str], clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module.os, "_exit", lambda code: pytest.fail("left"))
        with pytest.raises(Stopped), Requests() as requests, requests.deferred():
            send(signal.SIGUSR1)
            clock[0] += 60
            send(signal.SIGTERM)
            assert requests.stop == Stop("SIGUSR1", 138, requeue=True)
        assert job == ["requeue"]


def test_handlers_are_restored_and_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in HANDLED]
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # which request a save
        with Requests() as requests:
            send(signal.SIGHUP)
            send(number)
            assert requests.stop is None and requests.save
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_another_thread_leaves_the_handlers_alone() -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    found: list[bool] = []

    def run() -> None:
        with Requests() as requests:
            found.append(requests.poll() == (None, False))
            found.append([signal.getsignal(number) for number in HANDLED] == before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True, True]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script. It writes its arguments into `asked` beside it, and fails if there is a file `refuses`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "scontrol"
    lines = ["#!/bin/sh", f'echo "$@" > {folder}/asked', f"test -f {folder}/refuses || exit 0"]
    script.write_text("\n".join([*lines, "echo Requeue is disabled for the job >&2", "exit 1", ""]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    return script


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "41"}, "41"),
        ({"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "40_3"),
        ({"SLURM_JOB_ID": "41; rm -r x"}, None),
    ],
)
def test_job_id(variables: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert module.job_id() == found
    assert module.is_batch_job() == (found is not None)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")  # in a terminal
    assert not module.is_batch_job()


def test_requeue(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Done, refused, and without `scontrol`."""
    with caplog.at_level(logging.INFO):
        module.requeue()
        assert scontrol.with_name("asked").read_text() == "requeue 41\n"
        scontrol.with_name("refuses").touch()
        module.requeue()
        scontrol.unlink()
        module.requeue()
    reason = "Requeue is disabled for the job"
    assert caplog.messages[:2] == [
        "SLURM job 41 requeued",
        f"SLURM job 41 was not requeued ({reason}); submit it again with --ckpt_path last",
    ]
    assert "(no scontrol in PATH)" in caplog.messages[2]


def test_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job again, in the folder that it remembers; another job is none."""
    module.remember_job(tmp_path)
    assert not list(tmp_path.iterdir())  # outside of SLURM
    monkeypatch.setenv("SLURM_JOB_ID", "40")
    module.remember_job(tmp_path)
    assert names(tmp_path) == [module.JOB_RECORD] and not module.is_restarted(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert module.is_restarted(tmp_path) and not module.is_restarted(tmp_path / "elsewhere")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert not module.is_restarted(tmp_path)
    module.remember_job(tmp_path)
    assert module.is_restarted(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not module.is_restarted(tmp_path)


Arguments = Callable[..., list[str]]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`at_step(3, act)`: call it within the third training step."""

    def register(number: int, act: Callable[[], Any], name: str = "take_step") -> None:
        original, count = getattr(RadixModule, name), [0]

        def step(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                act()
            return original(*arguments)

        monkeypatch.setattr(RadixModule, name, step)

    return register


def test_a_signal_saves_and_another_one_stops(arguments: Arguments, at_step: Any, tmp_path: Path) -> None:
    at_step(2, lambda: send(signal.SIGUSR1))
    at_step(4, lambda: send(signal.SIGINT))
    assert main(arguments(trainer__max_steps=9)) == 130
    assert names(tmp_path / "out" / "checkpoints") == ["last", "step=2", "step=4"]


@FULL
def test_predict_that_is_stopped_leaves_nothing(
    arguments: Arguments, at_step: Any, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    at_step(2, lambda: send(signal.SIGTERM), "predict_step")
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
