"""A signal to one rank, to some or to all: every rank stops after the same step, saved once, and bit-equal afterwards.

RADIXTRAIN_TRIES=10 sends each signal 10 times; by default two cases once.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_changes import step_slowly
from launched_ranks import Launched
from outcomes import assert_nothing_left, assert_same_run
from tiers import cases, tries

from radixtrain.checkpoints.choice import newest_valid

TRIES = tries(1, 10)
SECONDS_TO_END = 60.0
# The signal, the ranks that it is sent to (none: the groups of all, with their workers), the strategy.
CASES: list[tuple[int, tuple[int, ...], str]] = [
    (signal.SIGTERM, (), "ddp"),
    (signal.SIGUSR1, (1,), "ddp"),
    (signal.SIGTERM, (1,), "fsdp2"),
    (signal.SIGTERM, (0,), "ddp"),
    (signal.SIGTERM, (0, 1), "fsdp2"),
    (signal.SIGINT, (), "ddp"),
    (signal.SIGHUP, (1,), "ddp"),
]


@pytest.fixture
def options(rows: Path) -> Callable[..., dict[str, Any]]:
    """Of a run on two ranks that validates in the middle of its epochs, and of the same one without a signal."""

    def build(strategy: str) -> dict[str, Any]:
        validates = {"data__validation_file": rows, "trainer__val_check_interval": 4}
        return {"ranks": 2, "strategy": strategy, "data__dataloader_num_workers": 1, **validates}

    return build


def wait_for(path: Path, launched: Launched) -> None:
    while not path.exists():
        assert launched.is_running, launched.said()
        time.sleep(0.001)


def first_step(folder: Path) -> Path:
    """A file that is written at the first step of a run."""
    return folder / "logs" / "version_0" / "metrics.csv"


def wait_for_steps(count: int, folder: Path, launched: Launched) -> None:
    """Of 20, so the signal comes before the last one."""
    wait_for(first_step(folder), launched)
    while len(first_step(folder).read_text().splitlines()) <= count:
        assert launched.is_running, launched.said()
        time.sleep(0.001)


def send(launched: Launched, number: int, ranks: tuple[int, ...]) -> None:
    if ranks:
        launched.send(number, *ranks)
    else:
        launched.send_groups(number)


@pytest.mark.parametrize(
    "case", cases(CASES, CASES[:2]), ids=lambda case: f"{signal.Signals(case[0]).name}-{case[1] or 'all'}-{case[2]}"
)
def test_a_signal(launch, train, reference, options, tmp_path, print_after, case):
    number, ranks, strategy = case
    whole = reference(**options(strategy))
    draw, seconds = random.Random(str(case)), []
    for attempt in range(TRIES):
        folder = tmp_path / f"run_{attempt}"
        launched = launch(folder, **options(strategy))
        wait_for_steps(draw.randint(1, 9), folder, launched)
        sent = time.monotonic()
        send(launched, number, ranks)
        codes = launched.wait(SECONDS_TO_END)
        seconds.append(launched.ended - sent)
        check(launched, codes, number, folder)
        launched.wait_for_workers()
        if codes[0]:
            train(folder, ckpt_path="last", **options(strategy))
        assert_same_run(folder, whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    name = f"{signal.Signals(number).name} to {f'rank {ranks}' if ranks else 'all'} of 2, {strategy}"
    print_after("devices", f"{name}: {TRIES} times, ended after {max(seconds):.1f} s at the latest; bit-equal")


def check(launched: Launched, codes: list[int], number: int, folder: Path) -> None:
    """All ranks end alike, and one of them says after which step, which is saved."""
    assert "Traceback" not in launched.said(), launched.said()
    if number == signal.SIGUSR1:
        assert codes == [0, 0], launched.said()
        return
    assert codes == [128 + number] * 2, f"{codes}\n{launched.said()}"
    (line,) = launched.errors()
    found = re.search(rf"stopped by {signal.Signals(number).name} after step (\d+), which is saved", line)
    assert found and newest_valid(folder / "checkpoints").path == folder / "checkpoints" / f"step={found[1]}", line


def test_a_second_signal_leaves_at_once(launch, heavy_model, tmp_path):
    """The first one waits for the end of a step that takes minutes."""
    launched = launch("run", ranks=2, before=step_slowly, model__model_name_or_path=heavy_model)
    wait_for(tmp_path / "run" / "step", launched)
    launched.send(signal.SIGTERM)
    time.sleep(1.1)
    assert launched.is_running
    sent = time.monotonic()
    launched.send(signal.SIGTERM)
    assert launched.wait(SECONDS_TO_END) == [143, 143], launched.said()
    assert launched.ended - sent < 1.0 and "a second SIGTERM: left at once" in launched.said()
    launched.wait_for_workers()


def test_the_file_stop(launch, tmp_path):
    """`touch stop` stops every rank, after the same step."""
    folder = tmp_path / "run"
    launched = launch(folder, ranks=2, strategy="ddp", trainer__max_steps=100_000)
    wait_for(first_step(folder), launched)
    (folder / "stop").touch()
    assert launched.wait(SECONDS_TO_END) == [130, 130], launched.said()
    (line,) = launched.errors()
    assert "stopped by the file stop after step" in line and not (folder / "stop").exists()
    assert_nothing_left(folder, tmp_path / "temporary")
