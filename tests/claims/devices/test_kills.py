"""`kill -9` of one rank at any moment: the others end within seconds with one line, and the run goes on bit for bit.

RADIXTRAIN_TRIES=20 kills 20 times for each rank and strategy, half of them during a save. Nothing watches over the
ranks here, as torchrun's agent would: the others find out by themselves.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from device_changes import read_slowly
from launched_ranks import Launched
from outcomes import assert_nothing_left, assert_same_run
from tiers import cases, tries

from radixtrain.checkpoints.choice import newest_valid

KILLS = tries(1, 20)
SECONDS_TO_END = 30.0  # stated for a rank that has died; on a busy machine
CASES = [(0, "ddp"), (1, "fsdp2"), (0, "fsdp2"), (1, "ddp")]
HANGING = [(1, "a save"), (0, "a step"), (1, "a step"), (0, "a save")]


def is_saving(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".step=*.partial"))


def wait_until(condition: Callable[[], bool], launched: Launched) -> None:
    while not condition():
        assert launched.is_running, launched.said()
        time.sleep(0.0005)


def assert_ends(launched: Launched, killed: int, since: float, folder: Path) -> float:
    """Seconds until the other ranks had ended, with an error code and one line that says what goes on from where."""
    codes = launched.wait(SECONDS_TO_END)
    others = [code for rank, code in enumerate(codes) if rank != killed]
    assert codes[killed] == -signal.SIGKILL and all(code == 1 for code in others), f"{codes}\n{launched.said()}"
    (line,) = launched.errors()
    newest = newest_valid(folder / "checkpoints")
    assert not newest.passed_over and "Traceback" not in launched.said(), launched.said()
    assert "rank" in line and (newest.path is None or "--ckpt_path" in line), line
    launched.wait_for_workers()
    return launched.ended - since


@pytest.mark.parametrize("case", cases(CASES, CASES[:1]), ids=str)
def test_a_killed_rank(launch, train, heavy_model, tmp_path, print_after, case):
    rank, strategy = case
    flags: dict[str, Any] = {"save_every_steps": 1, "model__model_name_or_path": heavy_model, "trainer__max_steps": 10}
    options = {"ranks": 2, "strategy": strategy, **flags}
    whole = train("whole", **options)
    draw, seconds, num_saving = random.Random(str(case)), [], 0
    for number in range(KILLS):
        folder, is_aimed = tmp_path / f"run_{number}", (number + rank) % 2 == 0
        launched = launch(folder, **options)
        step = draw.randint(2, 6)
        wait_until((folder / "checkpoints" / f"step={step}").exists, launched)
        if is_aimed:
            wait_until(partial(is_saving, folder), launched)
        else:
            time.sleep(draw.uniform(0.0, 0.05))
        killed = time.monotonic()
        launched.send(signal.SIGKILL, rank)
        num_saving += is_saving(folder)
        seconds.append(assert_ends(launched, rank, killed, folder))
        assert_same_run(train(folder, ckpt_path="last", **options), whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    told = f"{KILLS} times, {num_saving} of them while saving; the other ended after {max(seconds):.1f} s at the latest"
    print_after("devices", f"kill -9 of rank {rank} of 2, {strategy}: {told}; bit-equal when it goes on")


def test_a_rank_that_is_killed_while_rows_are_read(launch, tmp_path):
    """Before there is anything to go on from."""
    launched = launch("run", ranks=2, before=read_slowly)
    wait_until(lambda: "tokens" in launched.runs[0].said() or (tmp_path / "run" / ".lock").exists(), launched)
    killed = time.monotonic()
    launched.send(signal.SIGKILL, 1)
    assert_ends(launched, 1, killed, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("case", cases(HANGING, HANGING[:2]), ids=str)
def test_a_rank_that_hangs(launch, tmp_path, case):
    """Stopped, so its sockets stay open: the other one waits for `ddp_timeout`, and says so."""
    rank, when = case
    options = {"ranks": 2, "strategy": "ddp", "ddp_timeout": 3, "trainer__max_steps": 100_000}
    launched = launch("run", **options, save_every_steps=1 if when == "a save" else 1000)
    first = tmp_path / "run" / ("checkpoints/last" if when == "a save" else "logs/version_0/metrics.csv")
    wait_until(first.exists, launched)
    stopped, other = time.monotonic(), launched.runs[1 - rank]
    launched.send(signal.SIGSTOP, rank)
    try:
        assert other.wait(SECONDS_TO_END) == 1, launched.said()
        (line,) = launched.errors()
        assert other.ended - stopped >= 2.5
        assert "ddp_timeout" in line and "Traceback" not in launched.said(), launched.said()
        assert ("--ckpt_path" in line) == (when == "a save"), line
    finally:
        launched.kill()
    launched.wait_for_workers()
