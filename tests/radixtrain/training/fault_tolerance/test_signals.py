"""Signals that this process sends to itself. What a run does then: `test_stops.py`."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixtrain.errors import Stopped
from radixtrain.training.fault_tolerance import signals as module
from radixtrain.training.fault_tolerance.signals import HANDLED, Requests, Stop


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not in a SLURM job; signals as they were afterwards."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
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
    with Requests() as requests:
        send(signal.SIGHUP)
        send(signal.SIGUSR1)
        assert requests.stop is None and requests.save
    assert [signal.getsignal(number) for number in HANDLED] == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_request_to_save(number: int, tmp_path: Path) -> None:
    with Requests() as requests:
        send(number)
        assert requests.stop is None and requests.save


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
