"""A signal at any moment, to the process or to its whole group: saved, the exit code, and bit-equal when it goes on.

One comes at a known place; in `make test-full`, many at random ones, to runs that validate and generate answers. The
seconds from a signal to the end of the process are printed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from changed_runs import go_on_after_pause, pause, signal_early, wait_until_paused
from forked import Run
from outcomes import EXACT, assert_nothing_left, assert_same_run
from tiers import FULL, cases, tries

from radixtrain.checkpoints.resolve import newest_valid

TRIES = tries(1, 20)
AT_RANDOM = [
    *((signal.SIGTERM, "group", 2), (signal.SIGTERM, "process", 0), (signal.SIGINT, "group", 0)),
    *((signal.SIGINT, "process", 2), (signal.SIGHUP, "group", 2), (signal.SIGUSR1, "group", 2)),
]


@pytest.fixture
def line(arguments: Callable[..., list[str]], shop: Path) -> Callable[..., list[str]]:
    """The command line of ten steps. Two answers are generated in each validation, after the third and the eighth."""

    def build(output_dir: Path, **flags: Any) -> list[str]:
        evaluates = {
            "data__validation_file": shop / "validation.jsonl",
            "trainer__val_check_interval": 3,
            "evaluate_generation__metric": "exact_match",
            "evaluate_generation__max_new_tokens": 16,
            "evaluate_generation__num_samples": 2,
        }
        return arguments(output_dir=output_dir, **{**evaluates, **EXACT, **flags})

    return build


@pytest.mark.parametrize("place", cases(["step 4", "validation 3"], ["validation 3"]))
def test_a_signal_at_a_known_place(start, line, tmp_path, place):
    """To a run with workers, twice, as `timeout` and schedulers send it: to the process and to its group."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    flags = {"data__dataloader_num_workers": 1}
    assert start(line(whole, **flags)).wait() == 0
    run = start(line(folder, **flags), {"PAUSE": place}, before=pause)
    wait_until_paused(folder, run)
    run.send(signal.SIGTERM)
    run.send_group(signal.SIGTERM)
    go_on_after_pause(folder)
    assert run.wait() == 143, run.said()
    saved = 3 + (place == "step 4")
    assert f"stopped by SIGTERM after step {saved}, which is saved; resume with --ckpt_path" in run.error()
    run.wait_for_workers()
    last = start(line(folder, **flags, ckpt_path="last"))
    assert last.wait() == 0, last.said()
    assert_same_run(folder, whole)
    assert_nothing_left(folder, tmp_path / "temporary")


@FULL
@pytest.mark.parametrize("number", cases([signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], [signal.SIGTERM]))
def test_a_signal_while_libraries_are_imported(start, line, tmp_path, number):
    """Says that nothing was saved; SIGUSR1 has nothing to save, and the run goes on."""
    run = start(line(tmp_path / "run", trainer__max_steps=1), {"SIGNAL": str(int(number))}, before=signal_early)
    code = 0 if number == signal.SIGUSR1 else 128 + number
    assert run.wait() == code, run.said()
    assert code == 0 or run.said() == f"stopped by {number.name} before the run began; nothing was saved\n"


def test_a_second_signal_leaves_at_once(start, line, tmp_path):
    """The first one waits for the end of a step that does not come."""
    folder = tmp_path / "run"
    run = start(line(folder, data__dataloader_num_workers=2), {"PAUSE": "step 2"}, before=pause)
    wait_until_paused(folder, run)
    run.send_group(signal.SIGTERM)
    time.sleep(1.1)  # a second one that comes sooner is taken for the same
    assert run.is_running
    while run.is_running:
        run.send(signal.SIGTERM)
        time.sleep(1.1)
    assert run.wait() == 143 and "a second SIGTERM: left at once" in run.error(), run.said()
    run.wait_for_workers()


@FULL
def test_slurm_requeues(start, line, tmp_path):
    """SIGUSR1 in a batch job: saved, asked to run again, and the restarted job ends as if nothing had been."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    names = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    job = {**names, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert start(line(whole)).wait() == 0
    run = start(line(folder), {**job, "PAUSE": "step 5"}, before=pause)
    wait_until_paused(folder, run)
    run.send_group(signal.SIGUSR1)
    go_on_after_pause(folder)
    assert run.wait() == 138, run.said()
    assert (tmp_path / "asked").read_text() == "requeue 41\n"
    again = start(line(folder), job)
    assert again.wait() == 1 and "holds another run" in again.error()  # it was not restarted
    restarted = start(line(folder), {**job, "SLURM_RESTART_COUNT": "1"})
    assert restarted.wait() == 0, restarted.said()
    assert_same_run(folder, whole)


@FULL
@pytest.mark.parametrize("case", AT_RANDOM, ids=lambda case: f"{signal.Signals(case[0]).name}-{case[1]}-{case[2]}")
def test_a_signal_at_any_moment(start, line, tmp_path, case, print_after):
    number, target, workers = case
    flags = {"data__dataloader_num_workers": workers}
    whole = tmp_path / "whole"
    run = start(line(whole, **flags))
    assert run.wait() == 0, run.said()
    draw, duration = random.Random(str(case)), run.ended - run.started
    waited: list[float] = []
    for attempt in count():
        if len(waited) == TRIES:
            break
        folder = tmp_path / f"run_{attempt}"
        run = start(line(folder, **flags))
        time.sleep(draw.uniform(0.0, duration))
        sent = time.monotonic()
        with suppress(ProcessLookupError):  # it has ended
            (run.send_group if target == "group" else run.send)(number)
        check(run, run.wait(), number, folder)
        if run.ended >= sent:
            waited.append(run.ended - sent)
        run.wait_for_workers()
        resumes = newest_valid(folder / "checkpoints").path is not None
        last = start(line(folder, **flags, **{"ckpt_path": "last"} if resumes else {"overwrite": True}))
        assert last.wait() == 0, last.said()
        assert_same_run(folder, whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    told = f"{signal.Signals(number).name} to the {target}, {workers} workers: {len(waited)} times, bit-equal"
    seconds = f"; seconds to the end: median {statistics.median(waited):.2f}, worst {max(waited):.2f}"
    print_after("survival", told + ("" if number == signal.SIGUSR1 else seconds))


def check(run: Run, code: int, number: int, folder: Path) -> None:
    """One of the ends that a signal may have, and what is said and saved then."""
    newest = newest_valid(folder / "checkpoints")
    assert not newest.passed_over and "Traceback" not in run.said()
    if code == -number:  # Python was still starting, or ending with everything written
        assert newest.path is None or (folder / "model").is_dir()
    elif code == 0:  # after it has ended, or a request to save
        assert number == signal.SIGUSR1 or (folder / "model").is_dir()
    else:
        assert code == 128 + number, run.said()
        assert re.search(r"^stopped by|^error: interrupted", run.error()), run.said()
        if found := re.search(r"after step (\d+), which is saved", run.error()):
            assert newest.path == folder / "checkpoints" / f"step={found[1]}"
        elif "nothing" in run.error():
            assert newest.path is None
