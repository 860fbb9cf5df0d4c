"""Workers of a real DataLoader: signals do not reach them, and they end with the loader."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from radixtrain.data import workers
from radixtrain.data.cache import encode_blocks
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import UnreadRow
from radixtrain.data.steps import StepLoader, StepSampler
from radixtrain.data.workers import BLOCKED, _kill_daemons, blocked_signals, end_with_parent
from radixtrain.training.fault_tolerance.failures import explain
from radixtrain.training.fault_tolerance.signals import HANDLED
from tests.support import FULL
from tests.support.batches import CHATML, byte_tokenizer
from tests.support.processes import is_alive, wait_for_end


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(3600)
        return index


def loader(dataset: Dataset[int], **options: object) -> DataLoader[int]:
    return DataLoader(dataset, batch_size=None, num_workers=1, **options)  # type: ignore[arg-type]


def worker_of(iterator: Iterator[int]) -> int:
    return iterator._workers[0].pid  # type: ignore[attr-defined]


@pytest.fixture
def quiet() -> Iterator[None]:
    """torch raises from a handler when a worker is killed; it sets that one once, with the first worker."""
    next(iter(loader(Numbers())))
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_signal_does_not_end_a_worker(persistent: bool) -> None:
    data = loader(Numbers(), persistent_workers=persistent)
    for _ in range(2):  # epochs
        with blocked_signals():
            steps = iter(data)
        worker = worker_of(steps)
        first = next(steps)
        for number in BLOCKED:
            os.kill(worker, number)
        assert [first, *steps] == list(range(6))
    del data, steps
    assert wait_for_end(worker)


def test_signals_are_as_before_and_one_that_came_meanwhile_arrives() -> None:
    before, seen = signal.pthread_sigmask(signal.SIG_BLOCK, ()), []
    handler = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        with blocked_signals():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert not seen
        assert seen == [1] and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_what_is_left_at_the_end_is_killed(quiet: None) -> None:
    with blocked_signals():
        steps = iter(loader(Slow()))
    worker = worker_of(steps)
    assert is_alive(worker)
    _kill_daemons()
    assert wait_for_end(worker)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=FULL)])
def test_workers_of_a_killed_process_end(method: str) -> None:
    """Also of one that was killed while they started, and if a server forks them, Python's default from 3.14 on."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with blocked_signals():
            steps = iter(loader(Numbers(), worker_init_fn=end_with_parent, multiprocessing_context=method))
        if method == "forkserver":
            assert next(steps) == 0  # it lives as long as its run does
        os.write(write, str(worker_of(steps)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_for_end(int(os.read(read, 20)))


def steps_of_a_loader() -> int:
    return sum(map(len, StepLoader(Numbers(), StepSampler(6, 2, False, 0), num_workers=1)))  # type: ignore[arg-type]


def rows_of_a_pool() -> int:
    rows = [UnreadRow(b'{"prompt": "one", "completion": "two"}', "a.jsonl:1")] * 6
    blocks = encode_blocks(ChatEncoder(byte_tokenizer(CHATML)), rows, 2, skip_bad_rows=False)
    return sum(report.num_rows for _, report in blocks)


@pytest.mark.parametrize("work", [steps_of_a_loader, rows_of_a_pool])
def test_one_that_hangs_in_its_fork_is_started_again(work: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Python 3.11.10, if another thread holds a lock of the interpreter."""
    fork, started = os.fork, list[int]()

    def hanging() -> int:
        process = fork()
        if process == 0 and not started:
            time.sleep(3600)
        started.append(process)
        return process

    monkeypatch.setattr(os, "fork", hanging)
    monkeypatch.setattr(workers, "MAY_HANG", True)
    monkeypatch.setattr(workers, "SECONDS_TO_BEGIN", 0.5)
    assert work() == 6
    assert wait_for_end(started[0]) and len(started) > 1


class Full(Numbers):
    """Gives what no worker can hand over, as tensors are when /dev/shm is full."""

    def __getitem__(self, index: int) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise RuntimeError("unable to write to file </torch_81_2_0>: No space left on device (28)")


def test_a_batch_that_cannot_be_handed_over_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever. torch hears of exit codes by a handler that it sets once, and Lightning takes away."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as found:
        list(StepLoader(Full(), StepSampler(6, 2, False, 0), num_workers=1))  # type: ignore[arg-type]
    assert "could not hand its batch over" in str(explain(found.value, None))


def test_the_same_signals_are_requests_of_a_run() -> None:
    assert set(BLOCKED) == set(HANDLED)


def test_one_that_begins_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Even while a process that another thread forked meanwhile has its pipe."""
    pipe, held = os.pipe, list[int]()

    def inherited() -> tuple[int, int]:
        ends = pipe()
        held.extend([] if held else [os.dup(ends[1])])
        return ends

    monkeypatch.setattr(os, "pipe", inherited)
    monkeypatch.setattr(workers, "SECONDS_TO_BEGIN", 0.5)
    process = workers._Context().Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    assert (process.exitcode, caplog.messages) == (0, [])
    os.close(*held)
