"""A signal to one rank or to all: every rank stops after the same step, saved once, and goes on bit for bit."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest
from changed_runs import go_on_after_pause, pause, wait_until_paused
from launched_ranks import Launched
from outcomes import assert_nothing_left, assert_same_run
from tiers import FULL, tries

from radixtrain.checkpoints.resolve import newest_valid

TRIES = tries(1, 10)
pytestmark = FULL
# The signal, the ranks that it is sent to (none: the groups of all, with their workers), the strategy.
CASES: list[tuple[int, tuple[int, ...], str]] = [
    (signal.SIGTERM, (), "ddp"),
    (signal.SIGUSR1, (1,), "ddp"),
    (signal.SIGTERM, (1,), "fsdp2"),
    (signal.SIGTERM, (0,), "ddp"),
    (signal.SIGINT, (), "ddp"),
    (signal.SIGHUP, (1,), "ddp"),
]


def send(launched: Launched, number: int, ranks: tuple[int, ...]) -> None:
    if ranks:
        launched.send(number, *ranks)
    else:
        launched.send_groups(number)


@pytest.mark.parametrize("sp_size", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{signal.Signals(case[0]).name}-{case[1] or 'all'}-{case[2]}")
def test_a_signal(launch, train, reference, rows, tmp_path, print_after, case, sp_size):
    """Before a step of a run that validates in the middle of its epochs."""
    number, ranks, strategy = case
    validates = {"data__validation_file": rows, "trainer__val_check_interval": 4}
    options = {"ranks": 2, "strategy": strategy, "sp_size": sp_size, "data__dataloader_num_workers": 1, **validates}
    whole = reference(**options)
    draw = random.Random(str(case))
    for attempt in range(TRIES):
        folder = tmp_path / f"run_{attempt}"
        launched = launch(folder, before=[pause], environment={"PAUSE": f"step {draw.randint(1, 9)}"}, **options)
        wait_until_paused(folder, launched, 2)
        send(launched, number, ranks)
        go_on_after_pause(folder)
        codes = launched.wait()
        check(launched, codes, number, folder)
        launched.wait_for_workers()
        if codes[0]:
            train(folder, ckpt_path="last", **options)
        assert_same_run(folder, whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    name = f"{signal.Signals(number).name} to {f'rank {ranks}' if ranks else 'all'} of 2, {strategy}, sp_size {sp_size}"
    print_after("devices", f"{name}: {TRIES} times; bit-equal")


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
