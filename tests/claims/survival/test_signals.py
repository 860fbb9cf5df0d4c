"""A signal at any moment, to the process or to its whole group: saved, the exit code, and bit-equal when it goes on.

RADIXTRAIN_TRIES=20 sends each signal 20 times to the process and 20 times to its group, with 0 and with 2 workers, to
runs that validate and generate answers; by default three of the 16 cases are tried once. The seconds from a signal to
the end of the process are printed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from forked import Run
from outcomes import EXACT, assert_nothing_left, assert_same_run
from tiers import tries

from radixtrain.checkpoints.choice import newest_valid

TRIES = tries(1, 20)
SECONDS_TO_END = 60.0  # on a busy machine; half of what schedulers allow
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CASES = [
    (signal.SIGTERM, "group", 2),
    (signal.SIGINT, "process", 0),
    (signal.SIGUSR1, "group", 2),
]
OTHER_CASES = [
    (number, target, workers)
    for number in (*ENDING, signal.SIGUSR1)
    for target in ("process", "group")
    for workers in (0, 2)
    if (number, target, workers) not in CASES
]
SLURM = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}


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


class Sender:
    """Sends a signal at a random moment of a run, every second time between its first step and its last.

    before, training, seconds: until its first step, from there to its last one, and in all, without a signal.
    """

    def __init__(self, number: int, target: str, before: float, training: float, seconds: float):
        self.number, self.is_for_group = number, target == "group"
        self.before, self.training, self.seconds = before, training, seconds
        self.random = random.Random(f"{number} {target}")
        self.waited: list[float] = []
        self.num_saved = 0

    def send(self, run: Run, folder: Path) -> int | None:
        """The exit code; None if the run had ended before. The seconds until then are kept."""
        if len(self.waited) % 2 == 0:
            wait_for(first_step(folder), run)
            time.sleep(self.random.uniform(0.0, self.training))
        else:
            time.sleep(self.random.uniform(0.0, self.seconds))
        sent = time.monotonic()
        try:
            (run.send_group if self.is_for_group else run.send)(self.number)
        except ProcessLookupError:
            return None
        code = run.wait(SECONDS_TO_END + (self.seconds if self.number == signal.SIGUSR1 else 0.0))
        if run.ended < sent:
            return None
        self.waited.append(run.ended - sent)
        run.wait_for_workers()
        return code

    def check(self, run: Run, code: int, folder: Path) -> None:
        """One of the ends that a signal may have, and what is said and saved then."""
        newest = newest_valid(folder / "checkpoints")
        assert not newest.passed_over
        assert "Traceback" not in run.said()
        if code == -self.number:  # Python was still starting, or ending with everything written
            assert newest.path is None or (folder / "model").is_dir()
        elif code == 0:  # after it has ended to, or a request to save
            assert self.number == signal.SIGUSR1 or (folder / "model").is_dir()
        else:
            assert code == 128 + self.number, run.said()
            assert re.search(r"^stopped by|^error: interrupted", run.error()), run.said()
            if found := re.search(r"after step (\d+), which is saved", run.error()):
                assert newest.path == folder / "checkpoints" / f"step={found[1]}"
                self.num_saved += 1
            elif "nothing" in run.error():
                assert newest.path is None


def go_on(folder: Path) -> dict[str, Any]:
    return {"ckpt_path": "last"} if newest_valid(folder / "checkpoints").path else {"overwrite": True}


def first_step(folder: Path) -> Path:
    """A file that is written at the first step of a run."""
    return folder / "logs" / "version_0" / "metrics.csv"


def send_and_go_on(start: Any, line: Any, tmp_path: Path, case: tuple[int, str, int], print_after: Any) -> None:
    number, target, workers = case
    flags = {"data__dataloader_num_workers": workers}
    whole = tmp_path / "whole"
    run = start(line(whole, **flags))
    wait_for(first_step(whole), run)
    before = time.monotonic() - run.started
    wait_for(whole / "checkpoints" / "step=10", run)
    training = time.monotonic() - run.started - before
    assert run.wait() == 0, run.said()
    sender = Sender(number, target, before, training, run.ended - run.started)
    for number_of_run in count():
        if len(sender.waited) == TRIES:
            break
        folder = tmp_path / f"run_{number_of_run}"
        run = start(line(folder, **flags, overwrite=True))
        code = sender.send(run, folder)
        if code is not None:
            sender.check(run, code, folder)
        last = start(line(folder, **flags, **go_on(folder)))
        assert last.wait() == 0, last.said()
        assert_same_run(folder, whole)
        assert_nothing_left(folder, tmp_path / "temporary")
    name, waited = signal.Signals(number).name, sender.waited
    told = f"{name} to the {target}, {workers} workers: {len(waited)} times, {sender.num_saved} saved a step; bit-equal"
    seconds = f"; seconds to the end: median {statistics.median(waited):.2f}, worst {max(waited):.2f}"
    print_after("survival", told + ("" if number == signal.SIGUSR1 else seconds))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{signal.Signals(case[0]).name}-{case[1]}-{case[2]}")
def test_a_signal_at_any_moment(start, line, tmp_path, case, print_after):
    send_and_go_on(start, line, tmp_path, case, print_after)


@pytest.mark.skipif("RADIXTRAIN_TRIES" not in os.environ, reason="RADIXTRAIN_TRIES=20 runs it")
@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda case: f"{signal.Signals(case[0]).name}-{case[1]}-{case[2]}")
def test_other_targets(start, line, tmp_path, case, print_after):
    send_and_go_on(start, line, tmp_path, case, print_after)


def wait_for(path: Path, run: Run) -> None:
    """Until it exists. AssertionError if the run ends before."""
    while not path.exists():
        assert run.is_running, run.said()
        time.sleep(0.01)


def test_files_save_and_stop(start, line, tmp_path):
    """`touch save`, then `touch stop`, in a run that would take hours."""
    folder = tmp_path / "run"
    run = start(line(folder, trainer__max_epochs=100_000, save_every_minutes=None, data__validation_file=None,
                     evaluate_generation__metric=None, trainer__val_check_interval=None))  # fmt: skip
    wait_for(folder / "checkpoints" / "last", run)
    for name, code in (("save", None), ("stop", 130)):
        (folder / name).touch()
        while (folder / name).exists():
            assert run.is_running or code, run.said()
            time.sleep(0.01)
        assert code is None or run.wait() == code
    assert "stopped by the file stop after step" in run.error()
    assert_nothing_left(folder, tmp_path / "temporary")


@pytest.fixture
def long_steps(tmp_path: Path) -> Path:
    """Four rows of 2,500 tokens each, which share none: seconds for a step of the heavy model."""
    path, draw = tmp_path / "long.jsonl", random.Random(0)
    rows = [[draw.randrange(40, 200) for _ in range(2500)] for _ in range(4)]
    path.write_text("".join(f"{json.dumps({'input_ids': row, 'labels': row})}\n" for row in rows), encoding="utf-8")
    return path


def test_a_second_signal_leaves_at_once(start, arguments, heavy_model, long_steps, tmp_path):
    """The first one waits for the end of the step."""
    flags = {"data__train_file": long_steps, "data__dataloader_num_workers": 2, "trainer__max_epochs": 1000}
    run = start(arguments(**flags, **EXACT, model__model_name_or_path=heavy_model, data__max_tokens=99_999))
    while "attention=" not in run.said():
        assert run.is_running, run.said()
        time.sleep(0.01)
    run.send_group(signal.SIGTERM)
    time.sleep(1.1)
    assert run.is_running, "the step was too short for this test"
    second = time.monotonic()
    run.send(signal.SIGTERM)
    assert run.wait(SECONDS_TO_END) == 143, run.said()
    assert "a second SIGTERM: left at once" in run.error()
    assert run.ended - second < 1.0
    run.wait_for_workers()


def test_slurm_requeues(start, line, tmp_path):
    """SIGUSR1 in a batch job: saved, asked to run again, and the restarted job ends as if nothing had been."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    job = {**SLURM, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert start(line(whole)).wait() == 0
    run = start(line(folder, save_every_steps=1), job)
    wait_for(folder / "checkpoints" / "last", run)
    run.send_group(signal.SIGUSR1)
    assert run.wait() == 138, run.said()
    assert (tmp_path / "asked").read_text() == "requeue 41\n"
    restarted = start(line(folder, save_every_steps=1), {**job, "SLURM_RESTART_COUNT": "1"})
    assert restarted.wait() == 0, restarted.said()
    assert_same_run(folder, whole)
