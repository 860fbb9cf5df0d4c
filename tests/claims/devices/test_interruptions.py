"""A run that a signal or `kill -9` interrupts goes on bit for bit, on one process and on ranks.

`CASES` is the table: what comes, to whom, where the run is, on which ranks. Each case interrupts a run at a known
place, looks at how it ends, resumes it, and compares it with an uninterrupted one. `make test-full` also interrupts
runs at random moments. Nothing watches over the ranks here, as torchrun's agent would: they find out by themselves.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from radixtrain.checkpoints.resolve import newest_valid
from tests.support import FULL, cases, tries
from tests.support.processes import Launched, go_on_after_pause, pause, signal_early, wait_until_paused
from tests.support.runs import assert_nothing_left, assert_same_run, contents

TRIES, AT_RANDOM = tries(1, 10), tries(4, 40)
MEGABYTE = 1 << 20
AUTO = {"ckpt_path": "auto"}


@dataclass(frozen=True)
class Case:
    """An interruption. place: for `pause`; "step" and "save" are of a step that is drawn.

    to: a rank; "all" for every rank and its workers, as a terminal sends it; "twice" for the process and all, as
        `timeout` and schedulers do.
    """

    number: signal.Signals
    to: int | str
    place: str = "step"
    ranks: int = 1
    strategy: str | None = None
    sp_size: int = 1

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks, {self.strategy}, sp_size {self.sp_size}" if self.ranks > 1 else "one process"
        return f"{self.number.name} to {self.to} at a {self.place}, {ranks}"


KILL, TERM, INT, HUP, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
ON_RANKS = [(0, "ddp", 1), (1, "fsdp2", 1), (1, "ddp", 2)]
SIGNALS_ON_RANKS: list[tuple[signal.Signals, int | str, str]] = [
    *((TERM, "all", "ddp"), (TERM, 0, "ddp"), (TERM, 1, "fsdp2")),
    *((INT, "all", "ddp"), (HUP, 1, "ddp"), (USR1, 1, "ddp")),
]
QUICK = [Case(KILL, 0, "save"), Case(TERM, "twice", "validation 3")]
CASES = [
    *QUICK,
    *(Case(KILL, 0, "step 1"), Case(TERM, "twice", "step 4")),
    *(Case(KILL, to, place, 2, *how) for to, *how in ON_RANKS for place in ("step", "save")),
    Case(KILL, 1, "load 0 0", 2, "ddp"),
    *(Case(number, to, "step", 2, how, size) for number, to, how in SIGNALS_ON_RANKS for size in (1, 2)),
]


@pytest.fixture
def options_of(rows: Path, shop: Path) -> Callable[[Case], dict[str, Any]]:
    """The run that is interrupted: it saves each step, or validates inside of its epochs, or generates answers."""
    validates = {"data__validation_file": rows, "trainer__val_check_interval": 4, "data__dataloader_num_workers": 1}
    generates = {
        **{"data__train_file": shop / "train.jsonl", "data__validation_file": shop / "validation.jsonl"},
        **{"trainer__val_check_interval": 3, "data__max_tokens": 4096, "data__max_length": None},
        **{"evaluate_generation__metric": "exact_match", "evaluate_generation__num_samples": 2},
        "evaluate_generation__max_new_tokens": 16,
    }

    def build(case: Case) -> dict[str, Any]:
        ranks = {"ranks": case.ranks, "strategy": case.strategy, "sp_size": case.sp_size}
        kind = generates if case.place.startswith("validation") else validates
        return ranks | ({"save_every_steps": 1} if case.number == KILL else kind)

    return build


def send(launched: Launched, number: int, to: int | str) -> None:
    if isinstance(to, int) or to == "twice":
        launched.send(number, 0 if isinstance(to, str) else to)
    if isinstance(to, str):
        launched.send_groups(number)


@pytest.mark.parametrize("case", cases(CASES, QUICK), ids=str)
def test_an_interruption(launch, train, reference, options_of, tmp_path, print_after, case):
    options = options_of(case)
    whole, draw = reference(**options), random.Random(str(case))
    for attempt in range(TRIES):
        folder, (place, *exact) = tmp_path / f"run_{attempt}", case.place.split()
        where = " ".join([place, *(exact or [str(draw.randint(2, 9))])])
        launched = launch(folder, before=[pause], environment={"PAUSE": where}, **options)
        wait_until_paused(folder, launched, 1 if place in ("save", "load") else case.ranks)
        send(launched, case.number, case.to)
        if case.number == KILL:
            launched.runs[case.to].wait()
            assert case.ranks > 1 or place != "save" or [*(folder / "checkpoints").glob(".step=*.partial")]
        go_on_after_pause(folder)
        check_end(launched, case, folder)
        launched.wait_for_workers()
        for left in (folder / "logs/version_0/.predict.yaml.partial", folder / "answers/.step=3.csv.partial"):
            os.makedirs(left.parent, exist_ok=True)
            left.touch()  # as if it had been killed while it wrote one
        assert case.place not in ("load 0 0", "step 1") or not (folder / "checkpoints").exists()
        assert_same_run(train(folder, **options, **AUTO), whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    print_after("survival", f"{case}: {TRIES} times; bit-equal")


def check_end(launched: Launched, case: Case, folder: Path) -> None:
    """All ranks end alike, and one of them says why, and what is saved."""
    codes, lines, newest = launched.wait(), launched.errors(), newest_valid(folder / "checkpoints")
    assert "Traceback" not in launched.said() and not newest.passed_over, launched.said()
    if case.number == KILL:
        expected = [-KILL if rank == case.to else 1 for rank in range(case.ranks)]
        assert codes == expected and len(lines) == (case.ranks > 1), launched.said()
        assert all("rank" in line and (newest.path is None or "--ckpt_path" in line) for line in lines), lines
    elif case.number == USR1:
        assert codes == [0] * case.ranks and not lines, launched.said()
    else:
        assert codes == [128 + case.number] * case.ranks, f"{codes}\n{launched.said()}"
        (line,) = lines
        found = re.search(rf"stopped by {case.number.name} after step (\d+), which is saved", line)
        assert found and newest.path == folder / "checkpoints" / f"step={found[1]}", line


@FULL
@pytest.mark.parametrize(("rank", "when", "sp_size"), [(1, "a save", 1), (0, "a step", 1), (1, "a step", 2)])
def test_a_rank_that_hangs(launch, tmp_path, rank, when, sp_size):
    """Stopped, so its sockets stay open: the other one waits for `ddp_timeout`, and says so."""
    options = {"ranks": 2, "strategy": "ddp", "sp_size": sp_size, "ddp_timeout": 10, "trainer__max_steps": 100_000}
    launched = launch("run", **options, save_every_steps=1 if when == "a save" else 100_000)
    first = tmp_path / "run" / ("checkpoints/last" if when == "a save" else "logs/version_0/metrics.csv")
    while not first.exists():
        assert launched.is_running, launched.said()
        time.sleep(0.002)
    launched.send(signal.SIGSTOP, rank)
    try:
        assert launched.runs[1 - rank].wait() == 1, launched.said()
        (line,) = launched.errors()
        assert "ddp_timeout" in line and "Traceback" not in launched.said(), launched.said()
        assert ("No checkpoint was written yet" in line) == (when == "a step"), line
    finally:
        launched.kill()
    launched.wait_for_workers()


@FULL
@pytest.mark.parametrize("number", [TERM, HUP, USR1])
def test_a_signal_while_libraries_are_imported(launch, number):
    """Says that nothing was saved; SIGUSR1 has nothing to save, and the run goes on."""
    launched = launch("run", trainer__max_steps=1, before=[signal_early], environment={"SIGNAL": str(int(number))})
    (code,) = launched.wait()
    said = f"stopped by {number.name} before the run began; nothing was saved"
    assert (code, launched.errors()) == ((0, []) if number == USR1 else (128 + number, [said])), launched.said()


def test_a_second_signal_leaves_at_once(launch, tmp_path):
    """The first one waits for the end of a step that does not come."""
    launched = launch("run", data__dataloader_num_workers=2, before=[pause], environment={"PAUSE": "step 2"})
    wait_until_paused(tmp_path / "run", launched)
    launched.send_groups(TERM)
    time.sleep(1.1)  # a second one that comes sooner is taken for the same
    assert launched.is_running
    while launched.is_running:
        launched.send(TERM)
        time.sleep(1.1)
    assert launched.wait() == [143] and "a second SIGTERM: left at once" in launched.said()
    launched.wait_for_workers()


@FULL
def test_slurm_requeues(launch, reference, tmp_path):
    """SIGUSR1 in a batch job: saved, asked to run again, and the restarted job ends as if nothing had been."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    names = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    job = {**names, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    run = launch("run", before=[pause], environment={**job, "PAUSE": "step 5"})
    wait_until_paused(tmp_path / "run", run)
    run.send_groups(USR1)
    go_on_after_pause(tmp_path / "run")
    assert run.wait() == [138] and (tmp_path / "asked").read_text() == "requeue 41\n", run.said()
    again = launch("run", environment=job)
    assert again.wait() == [1] and "holds another run" in again.said()  # it was not restarted
    assert launch("run", environment={**job, "SLURM_RESTART_COUNT": "1"}).wait() == [0]
    assert_same_run(tmp_path / "run", reference())


SLURM = ({"SLURM_JOB_ID": "41"}, {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"})


@pytest.mark.parametrize(
    ("place", "ranks", "jobs"),
    cases(
        [("step 1", 1, ({}, {})), ("step 1", 1, SLURM), ("save 4", 1, SLURM), ("step 1", 2, ({}, {}))],
        [("step 1", 1, SLURM)],
    ),
)
def test_overwrite_that_is_killed_and_started_again(launch, reference, tmp_path, place, ranks, jobs):
    """With the same command line, as SLURM does: before the first checkpoint it begins again, then it resumes."""
    folder, flags = tmp_path / "run", {"save_every_steps": 1, "ranks": ranks}
    assert launch("run", trainer__max_steps=2).wait() == [0]
    earlier = contents(folder)
    run = launch("run", before=[pause], environment={"PAUSE": place, **jobs[0]}, overwrite=True, **flags)
    wait_until_paused(folder, run, ranks)
    run.send(KILL)
    assert run.wait() == [-KILL] * ranks and contents(tmp_path / "run.1") == earlier
    go_on_after_pause(folder)
    again = launch("run", environment=jobs[1], overwrite=True, **flags)
    assert again.wait() == [0] * ranks, again.said()
    assert_same_run(folder, reference(**flags))
    assert contents(tmp_path / "run.1") == earlier and not (tmp_path / "run.2").exists()


@FULL
@pytest.mark.parametrize(
    ("number", "to", "workers"),
    [(KILL, 0, 0), (KILL, 0, 1), (TERM, "all", 2), (INT, 0, 0), (HUP, "all", 2), (USR1, "all", 2)],
)
def test_at_any_moment(launch, train, heavy_model, tmp_path, print_after, number, to, workers):
    """Two of three are interrupted again after they were resumed. Saves take most of the time of such a run."""
    flags = {"model__model_name_or_path": heavy_model, "save_every_steps": 1, "data__dataloader_num_workers": workers}
    begin, whole = time.monotonic(), train("whole", **flags)
    draw, duration = random.Random(f"{number} {to}"), time.monotonic() - begin
    folder = tmp_path / "run"
    for attempt in range(AT_RANDOM):
        launched = launch(folder, **flags, **AUTO)
        time.sleep(draw.uniform(0.0, duration))
        with suppress(ProcessLookupError):  # it has ended
            send(launched, number, to)
        (code,), newest = launched.wait(), newest_valid(folder / "checkpoints")
        assert "Traceback" not in launched.said() and not newest.passed_over, launched.said()
        assert code in (0, -number, 128 + number), launched.said()  # not handled while Python starts, or ends
        if found := re.search(r"after step (\d+), which is saved", launched.said()):
            assert newest.path == folder / "checkpoints" / f"step={found[1]}"
        launched.wait_for_workers()
        if attempt % 3 == 2 or attempt == AT_RANDOM - 1:
            assert_same_run(train(folder, **flags, **AUTO), whole)
            assert_nothing_left(folder, tmp_path / "temporary")
            folder = tmp_path / f"run_{attempt}"
    print_after("survival", f"{number.name} to {to}, {workers} workers, at random: {AT_RANDOM} times; bit-equal")


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


@FULL
@pytest.mark.parametrize("left", [0, 8 * MEGABYTE], ids=["nothing left", "too little left"])
def test_a_full_disk(launch, train, reference, heavy_model, small_disk, left):
    """Between two saves: what is missing is noticed before the checkpoint is written, or the metrics fail first.

    In the middle of a save: `tests/radixtrain/checkpoints/test_folder.py`.
    """
    flags = {"model__model_name_or_path": heavy_model, "save_every_steps": 1}
    folder, ballast = small_disk / "run", small_disk / "ballast"
    run = launch(folder, **flags, before=[pause], environment={"PAUSE": "step 3"})
    wait_until_paused(folder, run)
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize > left:
            file.write(bytes(MEGABYTE))
    go_on_after_pause(folder)
    assert run.wait() == [1] and "Traceback" not in run.said(), run.said()
    (line,), newest = run.errors(), newest_valid(folder / "checkpoints")
    assert newest.path is not None and not newest.passed_over
    assert str(small_disk) in line and "free" in line and "--ckpt_path" in line, line
    ballast.unlink()
    assert_same_run(train(folder, **flags, **AUTO), reference(**flags))
    assert_nothing_left(folder)
