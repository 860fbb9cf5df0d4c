"""`kill -9` at any moment, half of them during a save: the run goes on, bit for bit as if nothing had happened.

RADIXTRAIN_TRIES=50 kills 50 times in all. A run is killed, goes on and is killed again, several times before it may
end. Also on a disk that fills up: a tmpfs if this user may mount one, and a limit on the size of files.
"""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from forked import Run
from outcomes import EXACT, assert_nothing_left, assert_same_run
from tiers import tries

from radixtrain.checkpoints.choice import newest_valid

KILLS = max(3, tries(3, 50))
SET_UPS = [{"data__dataloader_num_workers": 0}, {"data__dataloader_num_workers": 1}]
MEGABYTE = 1 << 20


@pytest.fixture
def lines(arguments: Callable[..., list[str]], heavy_model: Path) -> Callable[..., list[str]]:
    """The command line of ten steps, each of which is saved."""

    def build(output_dir: Path, **flags: Any) -> list[str]:
        options = {"save_every_steps": 1, "model__model_name_or_path": heavy_model, **EXACT, **flags}
        return arguments(output_dir=output_dir, **options)

    return build


@pytest.fixture
def on_memory_disk() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs a writable /dev/shm")
    with tempfile.TemporaryDirectory(prefix="radixtrain-kills-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 120 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written. An older one that is being deleted has such a name, too."""
    checkpoints = folder / "checkpoints"
    newest = max(map(number_of, checkpoints.glob("step=*")), default=0)
    return any(number_of(path) > newest for path in checkpoints.glob(".step=*.partial"))


def number_of(path: Path) -> int:
    """12 of `step=12` and of `.step=12.partial`."""
    return int(path.name.partition("=")[2].removesuffix(".partial"))


def wait_for(condition: Callable[[], bool], run: Run) -> bool:
    """Whether it became true while the run was running."""
    while not condition():
        if not run.is_running:
            return False
        time.sleep(0.0005)
    return True


class Killer:
    """Kills a run at a random moment, and during a save if less than half were. seconds: that a whole run takes."""

    def __init__(self, seconds: float, seed: int):
        self.seconds, self.random = seconds, random.Random(seed)
        self.num_kills = self.num_in_saves = 0
        self.longest_worker = 0.0  # seconds that one outlived its run

    def kill(self, run: Run, folder: Path) -> bool:
        """Whether it was still running. What it leaves is in order: the newest checkpoint is whole, no worker lives."""
        is_aimed = 2 * self.num_in_saves <= self.num_kills
        if not (self._wait_for_save(run, folder) if is_aimed else self._wait(run)):
            return False
        run.send(signal.SIGKILL)
        if run.wait() != -signal.SIGKILL:
            return False
        self.num_kills += 1
        self.num_in_saves += is_saving(folder)
        self.longest_worker = max(self.longest_worker, run.wait_for_workers())
        assert_newest_is_whole(folder / "checkpoints")
        return True

    def _wait(self, run: Run) -> bool:
        time.sleep(self.random.uniform(0, self.seconds))
        return run.is_running

    def _wait_for_save(self, run: Run, folder: Path) -> bool:
        """Until a part of the third to fifth save has passed; how long one takes is seen from those before."""
        longest = 0.0
        for _ in range(self.random.randint(2, 4)):
            if not wait_for(lambda: is_saving(folder), run):
                return False
            begin = time.monotonic()
            if not wait_for(lambda: not is_saving(folder), run):
                return False
            longest = max(longest, time.monotonic() - begin)
        if not wait_for(lambda: is_saving(folder), run):
            return False
        time.sleep(self.random.uniform(0, 0.6 * longest))
        return run.is_running


def assert_newest_is_whole(checkpoints: Path) -> None:
    """Nothing has to be passed over: what has the name of a checkpoint is one."""
    choice = newest_valid(checkpoints)
    assert not choice.passed_over
    newest = max(checkpoints.glob("step=*"), key=number_of, default=None)
    assert choice.path == newest


def go_on(folder: Path) -> dict[str, Any]:
    """The flags of the next start."""
    return {"ckpt_path": "last"} if newest_valid(folder / "checkpoints").path else {"overwrite": True}


def run_whole(start: Any, line: list[str]) -> float:
    """Seconds of the uninterrupted run."""
    run = start(line)
    assert run.wait() == 0, run.said()
    return run.ended - run.started


def survive(start: Any, line: Callable[..., list[str]], folder: Path, killer: Killer, kills: int) -> None:
    """Kill a run that many times, and let it come to its end."""
    for _ in range(kills):
        run = start(line(folder, **go_on(folder)), draws=True)
        if not killer.kill(run, folder):
            assert run.wait() == 0, run.said()
            break
    run = start(line(folder, **go_on(folder)))
    assert run.wait() == 0, run.said()


@pytest.mark.parametrize("flags", SET_UPS, ids=["no worker", "one worker"])
def test_killed_runs(start, lines, tmp_path, print_after, flags):
    kill_until(KILLS // 3, start, lambda folder, **more: lines(folder, **flags, **more), tmp_path, tmp_path,
               str(flags), print_after)  # fmt: skip


def test_killed_runs_on_another_disk(start, lines, tmp_path, on_memory_disk, print_after):
    """The temporary folder is on one disk and the run on another, between which nothing can be renamed."""
    assert tmp_path.stat().st_dev != on_memory_disk.stat().st_dev
    kill_until(KILLS - 2 * (KILLS // 3), start, lines, on_memory_disk, tmp_path, "another disk", print_after)


def kill_until(
    count: int, start: Any, line: Callable[..., list[str]], disk: Path, tmp_path: Path, name: str, print_after: Any
) -> None:
    """Runs that are killed up to five times each, until there were `count` kills in all."""
    shared = shared_memory()
    whole = disk / "whole"
    killer = Killer(run_whole(start, line(whole)), seed=len(name))
    number = 0
    while killer.num_kills < count:
        number += 1
        folder = disk / f"killed_{number}"
        survive(start, line, folder, killer, min(5, count - killer.num_kills))
        assert_same_run(folder, whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    assert not [path for path in shared_memory() if path not in shared]
    told = f"{killer.num_kills}, {killer.num_in_saves} of them while saving, in {number} runs; all bit-equal"
    print_after("survival", f"kills, {name}: {told}; workers gone {killer.longest_worker:.1f} s later at the latest")


def shared_memory() -> set[Path]:
    """What torch's workers hand batches over in."""
    return set(Path("/dev/shm").glob("torch_*"))


def fill(disk: Path, left: int, name: str = "ballast") -> Path:
    """A new file that leaves about that many bytes of the disk, whatever else is being written to it."""
    path = disk / name
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > left:
            file.write(bytes(MEGABYTE))
    return path


def assert_says_that_it_is_full(run: Run, disk: Path, folder: Path) -> None:
    """One line that names the disk and what to go on from, and the newest checkpoint is whole."""
    assert run.wait() == 1, run.said()
    assert "Traceback" not in run.said()
    newest = newest_valid(folder / "checkpoints")
    assert newest.path is not None and not newest.passed_over
    line = run.error()
    assert line.startswith("error: ") and str(disk) in line and "free" in line and "--ckpt_path" in line, line


@pytest.mark.parametrize("left", [0, 8 * MEGABYTE], ids=["nothing left", "too little left"])
def test_a_full_disk(start, lines, tmp_path, small_disk, left):
    """Between two saves: what is missing is noticed before the checkpoint is written, or the metrics fail first."""
    whole, folder = tmp_path / "whole", small_disk / "run"
    run_whole(start, lines(whole))
    run = start(lines(folder))
    assert wait_for(lambda: (folder / "checkpoints" / "step=2").exists(), run), run.said()
    ballast = fill(small_disk, left)
    assert_says_that_it_is_full(run, small_disk, folder)
    ballast.unlink()
    assert not is_saving(folder)
    finish_as(whole, start, lines, folder, tmp_path)


def test_a_disk_that_fills_during_a_save(start, lines, tmp_path, small_disk):
    """There was room when it was looked at. Tried at each save until it is met in the middle of a write."""
    whole, folder = tmp_path / "whole", small_disk / "run"
    run_whole(start, lines(whole))
    run = start(lines(folder))
    assert wait_for(lambda: (folder / "checkpoints" / "step=2").exists(), run), run.said()
    ballast = fill(small_disk, 32 * MEGABYTE)
    while wait_for(lambda: is_saving(folder), run):
        more = fill(small_disk, 0, "more")
        wait_for(lambda: not is_saving(folder), run)
        more.unlink()
    assert_says_that_it_is_full(run, small_disk, folder)
    ballast.unlink()
    finish_as(whole, start, lines, folder, tmp_path)


def test_a_limit_on_the_size_of_files(start, lines, tmp_path):
    """`ulimit -f` fails like a full disk, and needs no rights: the optimizer's file is too large, not the model's."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run_whole(start, lines(whole))
    first = start(lines(folder, trainer__max_steps=3))
    assert first.wait() == 0, first.said()
    run = start(lines(folder, ckpt_path="last"), largest_file=10 * MEGABYTE)
    assert run.wait() == 1, run.said()
    assert "ulimit -f" in run.error() and "--ckpt_path" in run.error() and "Traceback" not in run.said()
    assert_newest_is_whole(folder / "checkpoints")
    assert_nothing_left(folder, tmp_path / "temporary")


def finish_as(whole: Path, start: Any, line: Callable[..., list[str]], folder: Path, tmp_path: Path) -> None:
    run = start(line(folder, **go_on(folder)))
    assert run.wait() == 0, run.said()
    assert_same_run(folder, whole)
    assert_nothing_left(folder, tmp_path / "temporary")
