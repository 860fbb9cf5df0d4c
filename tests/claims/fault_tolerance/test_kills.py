"""`kill -9` at any moment, half of them during a save: the run goes on, bit for bit as if nothing had happened.

`make test` kills one run with a checkpoint half written. `make test-full` kills at random moments: a run is killed,
goes on and is killed again, several times before it may end. Also on a disk that fills up, a tmpfs if this user may
mount one.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from changed_runs import go_on_after_pause, pause, wait_until_paused
from forked import Run
from outcomes import EXACT, assert_nothing_left, assert_same_run
from tiers import FULL, cases, tries

from radixtrain.__main__ import main
from radixtrain.checkpoints.resolve import newest_valid

KILLS = tries(2, 25)
MEGABYTE = 1 << 20


@pytest.fixture
def lines(arguments: Callable[..., list[str]], heavy_model: Path) -> Callable[..., list[str]]:
    """The command line of ten steps, each of which is saved."""

    def build(output_dir: Path, **flags: Any) -> list[str]:
        options = {"save_every_steps": 1, "model__model_name_or_path": heavy_model, **EXACT, **flags}
        return arguments(output_dir=output_dir, **options)

    return build


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

    def kill(self, run: Run, folder: Path) -> bool:
        """Whether it was still running. What it leaves is in order: the newest checkpoint is whole, no worker lives."""
        if 2 * self.num_in_saves > self.num_kills:
            time.sleep(self.random.uniform(0, self.seconds))
        elif not self._wait_for_save(run, folder):
            return False
        if not run.is_running:
            return False
        run.send(signal.SIGKILL)
        if run.wait() != -signal.SIGKILL:
            return False
        self.num_kills += 1
        self.num_in_saves += is_saving(folder)
        run.wait_for_workers()
        assert_newest_is_whole(folder / "checkpoints")
        return True

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
        time.sleep(self.random.uniform(0, 0.6 * longest) if wait_for(lambda: is_saving(folder), run) else 0.0)
        return run.is_running


def assert_newest_is_whole(checkpoints: Path) -> None:
    """Nothing has to be passed over: what has the name of a checkpoint is one."""
    choice = newest_valid(checkpoints)
    assert not choice.passed_over
    newest = max(checkpoints.glob("step=*"), key=number_of, default=None)
    assert choice.path == newest


AUTO = {"ckpt_path": "auto"}  # of every start, the first one and the last


def run_whole(start: Any, line: list[str]) -> float:
    """Seconds of the uninterrupted run."""
    run = start(line)
    assert run.wait() == 0, run.said()
    return run.ended - run.started


def killed_at(place: str, start: Any, line: list[str], folder: Path, environment: dict[str, str]) -> None:
    run = start(line, {"PAUSE": place, **environment}, before=pause)
    wait_until_paused(folder, run)
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.wait_for_workers()
    for path in folder.glob("paused_*"):
        path.unlink()


def test_one_command_goes_on_whenever_it_was_killed(start, arguments, tmp_path):
    """Before the first checkpoint, with one half written, and once nothing is left to do."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    flags = {"save_every_steps": 1, "data__dataloader_num_workers": 1, **EXACT, **AUTO}
    run_whole(start, arguments(output_dir=whole, **flags))
    line = arguments(output_dir=folder, **flags)
    killed_at("step 1", start, line, folder, {})
    assert not (folder / "checkpoints").exists()
    killed_at("save 4", start, line, folder, {})
    assert is_saving(folder) and newest_valid(folder / "checkpoints").path == folder / "checkpoints" / "step=3"
    finish_as(whole, start, lambda into, **_: arguments(output_dir=into, **flags), folder, tmp_path)
    run = start(line)
    assert run.wait() == 0 and "nothing left to do" in run.printed(), run.said()
    assert_same_run(folder, whole)


PLAIN: tuple[dict[str, str], dict[str, str]] = ({}, {})
SLURM = ({"SLURM_JOB_ID": "41"}, {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"})


@pytest.mark.parametrize(
    ("place", "devices", "environments"),
    cases(
        [*(("step 1", devices, jobs) for devices in (1, 2) for jobs in (PLAIN, SLURM)), ("save 4", 1, SLURM)],
        [("step 1", 1, SLURM)],
    ),
)
def test_overwrite_that_is_killed_and_started_again(start, arguments, tmp_path, place, devices, environments):
    """With the same command line, as SLURM does: before the first checkpoint it begins again, then it resumes."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert main(arguments(output_dir=folder, trainer__max_steps=2)) == 0
    earlier = contents(folder)
    flags = {"save_every_steps": 1, "overwrite": True, "trainer__devices": devices, **EXACT}
    run_whole(start, arguments(output_dir=whole, **flags))
    line, (first, again) = arguments(output_dir=folder, **flags), environments
    killed_at(place, start, line, folder, first)
    assert contents(tmp_path / "run.1") == earlier
    run = start(line, again)
    assert run.wait() == 0, run.said()
    assert_same_run(folder, whole)
    assert contents(tmp_path / "run.1") == earlier and not (tmp_path / "run.2").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@FULL
@pytest.mark.parametrize("workers", [0, 1])
def test_killed_runs(start, lines, tmp_path, print_after, workers):
    """Each up to five times, until there were enough kills in all."""
    shared, whole = left_in_shared_memory(), tmp_path / "whole"
    flags = {"data__dataloader_num_workers": workers}
    killer = Killer(run_whole(start, lines(whole, **flags)), seed=workers)
    number = 0
    while killer.num_kills < KILLS:
        number += 1
        folder = tmp_path / f"killed_{number}"
        for _ in range(min(5, KILLS - killer.num_kills)):
            run = start(lines(folder, **flags, **AUTO), draws=True)
            if not killer.kill(run, folder):
                assert run.wait() == 0, run.said()
                break
        run = start(lines(folder, **flags, **AUTO), draws=True)  # over a half-drawn picture
        assert run.wait() == 0, run.said()
        assert_same_run(folder, whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    deadline = time.monotonic() + 60.0
    while left_in_shared_memory() - shared:
        assert time.monotonic() < deadline, left_in_shared_memory() - shared
        time.sleep(0.1)
    told = f"{killer.num_kills}, {killer.num_in_saves} of them while saving, in {number} runs; all bit-equal"
    print_after("survival", f"kills, {workers} workers: {told}")


def left_in_shared_memory() -> set[Path]:
    """What torch's workers hand batches over in, `torch_PID_...`, of processes that have ended."""
    return {path for path in Path("/dev/shm").glob("torch_*") if not Path("/proc", path.name.split("_")[1]).exists()}


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


@FULL
@pytest.mark.parametrize("left", [0, 8 * MEGABYTE], ids=["nothing left", "too little left"])
def test_a_full_disk(start, lines, tmp_path, small_disk, left):
    """Between two saves: what is missing is noticed before the checkpoint is written, or the metrics fail first.

    In the middle of a save: `tests/radixtrain/checkpoints/test_folder.py`.
    """
    whole, folder = tmp_path / "whole", small_disk / "run"
    run_whole(start, lines(whole))
    run = start(lines(folder), {"PAUSE": "step 3"}, before=pause)
    wait_until_paused(folder, run)
    ballast = fill(small_disk, left)
    go_on_after_pause(folder)
    assert_says_that_it_is_full(run, small_disk, folder)
    ballast.unlink()
    assert not is_saving(folder)
    finish_as(whole, start, lines, folder, tmp_path)


def finish_as(whole: Path, start: Any, line: Callable[..., list[str]], folder: Path, tmp_path: Path) -> None:
    run = start(line(folder, **AUTO))
    assert run.wait() == 0, run.said()
    assert_same_run(folder, whole)
    assert_nothing_left(folder, tmp_path / "temporary")
