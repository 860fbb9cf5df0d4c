"""Ranks that are started as users type it train the same as the forked ones of the other tests, bit for bit.

Real processes take ten seconds to import what they need. Signals, kills, errors: `tests/radixtrain/training/devices`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL
from tests.support.processes import ONE_THREAD
from tests.support.runs import assert_nothing_left, assert_same_run, summary

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "radixtrain")
SECONDS = 240.0
FLAGS: dict[str, Any] = {"trainer__max_steps": 8, "save_every_steps": 2}
pytestmark = FULL


@pytest.fixture
def whole(reference: Callable[..., Path]) -> Path:
    """The same run on two forked ranks."""
    return reference(ranks=2, strategy="ddp", **FLAGS)


@pytest.fixture
def torchrun(line: Callable[..., list[str]], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts torchrun in a process group of its own. It takes the number of ranks from there, and `ddp` by default."""

    def start(name: str, **flags: Any) -> subprocess.Popen[str]:
        variables = {**ONE_THREAD, **os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, *TORCHRUN, *line(name, **{**FLAGS, **flags})]
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        return subprocess.Popen(command, env=variables, **pipes)

    return start


def test_torchrun(torchrun, whole, tmp_path):
    run = torchrun("run")
    _, said = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, said
    assert_same_run(tmp_path / "run", whole)
    assert_nothing_left(tmp_path / "run")


def test_sigterm_to_torchrun(torchrun, tmp_path):
    """It passes the signal on to both ranks."""
    run = torchrun("run", trainer__max_steps=100_000)
    while not (tmp_path / "run" / "checkpoints" / "last").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=SECONDS)
    assert run.returncode != 0 and len(re.findall(r"^stopped by SIGTERM after step", said, re.MULTILINE)) == 1, said


def test_processes_of_its_own(start, line, whole, tmp_path):
    run = start(line("run", trainer__devices=2, **FLAGS))
    assert run.wait() == 0, run.said()
    run.wait_for_workers(60.0)
    assert_same_run(tmp_path / "run", whole)
    assert len([*(tmp_path / "run" / "logs").iterdir()]) == 1 and summary(tmp_path / "run")["ranks"] == 2
    assert "on 2 ranks" in run.printed() and run.printed().count("tokens/s") == run.said().count("parameters") == 1
