"""`kill -9` of one rank at any moment: the others end by themselves with one line, and the run goes on bit for bit.

Nothing watches over the ranks here, as torchrun's agent would: the others find out by themselves.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_runs import go_on_after_pause, pause, wait_until_paused
from launched_ranks import Launched
from outcomes import assert_nothing_left, assert_same_run
from tiers import FULL, tries

from radixtrain.checkpoints.resolve import newest_valid

KILLS = tries(1, 20)
pytestmark = FULL


def assert_ends(launched: Launched, killed: int, folder: Path) -> None:
    """The other ranks end with an error code, and one line that says from where the run goes on."""
    codes = launched.wait()
    others = [code for rank, code in enumerate(codes) if rank != killed]
    assert codes[killed] == -signal.SIGKILL and all(code == 1 for code in others), f"{codes}\n{launched.said()}"
    (line,) = launched.errors()
    newest = newest_valid(folder / "checkpoints")
    assert not newest.passed_over and "Traceback" not in launched.said(), launched.said()
    assert "rank" in line and (newest.path is None or "--ckpt_path" in line), line
    launched.wait_for_workers()


@pytest.mark.parametrize("place", ["step", "save"])
@pytest.mark.parametrize(("rank", "strategy", "sp_size"), [(0, "ddp", 1), (1, "fsdp2", 1), (1, "ddp", 2)])
def test_a_killed_rank(launch, train, reference, tmp_path, print_after, rank, strategy, sp_size, place):
    """Before a step, and while a checkpoint is half written."""
    options = {"ranks": 2, "strategy": strategy, "sp_size": sp_size, "save_every_steps": 1}
    whole = reference(**options)
    draw = random.Random(f"{rank} {strategy} {sp_size} {place}")
    for number in range(KILLS):
        folder = tmp_path / f"run_{number}"
        where = f"{place} {draw.randint(2, 9)}"
        launched = launch(folder, before=[pause], environment={"PAUSE": where}, **options)
        wait_until_paused(folder, launched, 2 if place == "step" else 1)
        launched.send(signal.SIGKILL, rank)
        launched.runs[rank].wait()
        go_on_after_pause(folder)
        assert_ends(launched, rank, folder)
        assert_same_run(train(folder, ckpt_path="last", **options), whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    print_after(
        "devices",
        f"kill -9 of rank {rank} of 2, {strategy}, sp_size {sp_size}, {place}: {KILLS} times; bit-equal after it",
    )


def test_a_rank_that_is_killed_while_weights_are_loaded(launch, tmp_path):
    """Before there is anything to go on from."""
    launched = launch("run", ranks=2, before=[pause], environment={"PAUSE": "load 0 0"})
    wait_until_paused(tmp_path / "run", launched)
    launched.send(signal.SIGKILL, 1)
    launched.runs[1].wait()
    go_on_after_pause(tmp_path / "run")
    assert_ends(launched, 1, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("rank", "when", "sp_size"), [(1, "a save", 1), (0, "a step", 1), (1, "a step", 2)])
def test_a_rank_that_hangs(launch, tmp_path, rank, when, sp_size):
    """Stopped, so its sockets stay open: the other one waits for `ddp_timeout`, and says so."""
    options = {"ranks": 2, "strategy": "ddp", "sp_size": sp_size, "ddp_timeout": 10, "trainer__max_steps": 100_000}
    launched = launch("run", **options, save_every_steps=1 if when == "a save" else 100_000)
    first = tmp_path / "run" / ("checkpoints/last" if when == "a save" else "logs/version_0/metrics.csv")
    wait_until(first.exists, launched)
    launched.send(signal.SIGSTOP, rank)
    try:
        assert launched.runs[1 - rank].wait() == 1, launched.said()
        (line,) = launched.errors()
        assert "ddp_timeout" in line and "Traceback" not in launched.said(), launched.said()
        assert ("No checkpoint was written yet" in line) == (when == "a step"), line
    finally:
        launched.kill()
    launched.wait_for_workers()


def wait_until(condition: Callable[[], bool], launched: Launched) -> None:
    while not condition():
        assert launched.is_running, launched.said()
        time.sleep(0.002)
