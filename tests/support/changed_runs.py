"""What a run does otherwise in a test: functions for `Server.start(before=...)`, called in its process first.

run = start(arguments, {"PAUSE": "save 3"}, before=pause)
wait_until_paused(folder, run)          # it is in the middle of writing its third checkpoint
run.send(signal.SIGTERM)
go_on_after_pause(folder)
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    *("FLOAT64", "compute_in_float64", "fail_on_rank_1", "go_on_after_pause", "memory", "note_memory_of_saves"),
    *("limit_open_files", "lose_screen", "pause", "signal_early", "stop_in_lock", "wait_until_paused"),
    "work_in_folder_of_rank",
]


def compute_in_float64() -> None:
    """What this process would cast to float32 stays float64, until it ends."""
    from radixtrain.verification.oracle import float64_arithmetic

    arithmetic = float64_arithmetic()
    arithmetic.__enter__()
    atexit.register(arithmetic.__exit__, None, None, None)  # which also keeps it: collected, it would end


FLOAT64: dict[str, Any] = {
    **{"model__dtype": "float64", "trainer__precision": "64-true"},
    "before": [compute_in_float64],
}
"""Options of a run that is to agree with one that adds in another order: rounding leaves 1e-15 to 1e-13."""


def pause() -> None:
    """Wait at the place in the variable PAUSE, until `go_on_after_pause`.

    "step 3": before the third training step. "validation 3": before a validation that follows the third, and before
    each of its batches. "save 3": in the checkpoint of the third, with the weights written and not the optimizer.
    "load": before the weights are loaded. "step 3 0", "load 0 0": only on rank 0, which "save" always is.
    """
    from radixtrain.checkpoints import tensors
    from radixtrain.training import module

    place, *numbers = os.environ["PAUSE"].split()
    number, rank = [*map(int, numbers), None, None][:2]
    if rank not in (None, int(os.environ.get("RANK", "0"))):
        return
    model = module.RadixModule
    if place == "load":
        vars(module)["load_trainable"] = _paused_before(module.load_trainable, lambda *_: True)
    elif place == "step":
        _replace(model, "take_step", lambda run, *_: run.global_step + 1 == number)
    elif place == "validation":
        _replace(model, "evaluated", lambda run, *_: run.global_step == number)
    else:
        parts = "optimizer.safetensors", f"step={number}"
        _replace(tensors, "write_file", lambda path, _: path.name == parts[0] and parts[1] in path.parent.name)


def wait_until_paused(folder: Path, run: Any, count: int = 1) -> None:
    """Until so many ranks are. AssertionError if the run, a `Run` or a `Launched`, ends before, or takes minutes."""
    deadline = time.monotonic() + 180.0
    while len(list(folder.glob("paused_*"))) < count:
        assert run.is_running and time.monotonic() < deadline, run.said()
        time.sleep(0.002)


def go_on_after_pause(folder: Path) -> None:
    for path in folder.glob("paused_*"):
        path.unlink()


def limit_open_files() -> None:
    """To as many as the variable FILES says, which cannot be raised."""
    count = int(os.environ["FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def lose_screen() -> None:
    """Nobody reads what is printed, as after `| tee` has ended."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.dup2(write, 2)


def signal_early() -> None:
    """The signal in the variable SIGNAL comes before the command is imported."""
    import radixtrain.__main__ as entrance

    vars(entrance)["check_versions"] = lambda *_: os.kill(os.getpid(), int(os.environ["SIGNAL"]))


def stop_in_lock() -> None:
    """Stop the process (SIGSTOP) as soon as the model's folder is locked for it."""
    from radixtrain.training.fault_tolerance import run_folder

    lock = run_folder._lock

    @contextmanager
    def stopping(path: Path, *arguments: Any) -> Iterator[None]:
        with lock(path, *arguments):
            if path.name == ".model.lock":
                os.kill(os.getpid(), signal.SIGSTOP)
            yield

    vars(run_folder)["_lock"] = stopping


def work_in_folder_of_rank() -> None:
    """In the folder `0` or `1` of the one in the variable FOLDERS."""
    os.chdir(os.path.join(os.environ["FOLDERS"], os.environ["RANK"]))


def fail_on_rank_1() -> None:
    """The second step of rank 1 raises an error that nobody expects."""
    from radixtrain.training.module import RadixModule

    step = RadixModule.take_step

    def failing(module: Any, *arguments: Any) -> Any:
        if os.environ["RANK"] == "1" and module.global_step == 1:
            raise OSError(5, "the disk of rank 1 is broken")
        return step(module, *arguments)

    setattr(RadixModule, "take_step", failing)  # noqa: B010  # mypy refuses the plain assignment


def note_memory_of_saves() -> None:
    """Write into `memory_of_saves` in the run's folder how many bytes each save holds more than there were before."""
    from radixtrain.training.loop import Loop

    path, save = _folder() / "memory_of_saves", Loop.save_checkpoint

    def noting(*arguments: Any, **options: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = memory("self", "VmRSS")
        save(*arguments, **options)
        with path.open("a") as file:
            file.write(f"{memory('self', 'VmHWM') - before}\n")

    setattr(Loop, "save_checkpoint", noting)  # noqa: B010  # as above


def memory(pid: int | str, what: str) -> int:
    """Bytes that a process holds, `VmRSS`, or the most that it has held, `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def _folder() -> Path:
    return next(Path(each.partition("=")[2]) for each in sys.argv if each.startswith("--output_dir="))


def _replace(owner: Any, name: str, is_there: Callable[..., bool]) -> None:
    setattr(owner, name, _paused_before(getattr(owner, name), is_there))


def _paused_before(function: Callable[..., Any], is_there: Callable[..., bool]) -> Callable[..., Any]:
    """The function, which waits while there is a file `paused_RANK` in the run's folder, that it writes."""
    mark = _folder() / f"paused_{os.environ.get('RANK', '0')}"

    def paused(*arguments: Any, **options: Any) -> Any:
        if is_there(*arguments):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            while mark.exists():
                time.sleep(0.002)
        return function(*arguments, **options)

    return paused
