"""Ranks that are started as users type it train the same as the forked ones of the other tests, bit for bit.

Real processes take ten seconds to import what they need. RADIXTRAIN_TRIES=1 ends them by signals, too.
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
from forked import Run
from outcomes import assert_nothing_left, assert_same_run
from tiers import FULL

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "radixtrain")
SECONDS = 240.0
FLAGS: dict[str, Any] = {"trainer__max_steps": 8, "save_every_steps": 2}


@pytest.fixture
def whole(reference: Callable[..., Path]) -> Path:
    """The same run on two forked ranks."""
    return reference(ranks=2, strategy="ddp", **FLAGS)


@pytest.fixture
def torchrun(line: Callable[..., list[str]], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts torchrun in a process group of its own. It takes the number of ranks from there, and `ddp` by default."""

    def start(name: str, **flags: Any) -> subprocess.Popen[str]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
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


def wait_for(path: Path, is_running: Callable[[], bool]) -> None:
    while not path.exists():
        assert is_running()
        time.sleep(0.002)


@FULL
def test_sigterm_to_torchrun(torchrun, train, whole, tmp_path):
    """It passes the signal on to both ranks."""
    run = torchrun("run")
    wait_for(tmp_path / "run" / "checkpoints" / "last", lambda: run.poll() is None)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=SECONDS)
    assert run.returncode != 0 and len(re.findall(r"^stopped by SIGTERM after step", said, re.MULTILINE)) == 1, said
    train("run", ranks=2, strategy="ddp", ckpt_path="last", **FLAGS)
    assert_same_run(tmp_path / "run", whole)


@pytest.fixture
def own(start: Callable[..., Run], line: Callable[..., list[str]]) -> Callable[..., Run]:
    """Starts a run on two devices, which starts the other process itself."""
    return lambda name, **flags: start(line(name, trainer__devices=2, **{**FLAGS, **flags}))


def child_of(run: Run) -> int:
    """The process that a run has started."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while not (found := children.read_text().split()):
        assert run.is_running, run.said()
        time.sleep(0.01)
    return int(found[0])


@FULL
def test_a_child_that_is_killed(own, train, whole, tmp_path):
    """The run ends with one line, and goes on from there under torchrun."""
    folder = tmp_path / "run"
    run = own("run")
    wait_for(folder / "checkpoints" / "last", lambda: run.is_running)
    os.kill(child_of(run), signal.SIGKILL)
    killed = time.monotonic()
    assert run.wait() == 1, run.said()
    assert run.ended - killed < 30.0
    errors = [text for text in run.said().splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and "rank 1" in errors[0] and "--ckpt_path" in errors[0], run.said()
    assert "Traceback" not in run.said()
    run.wait_for_workers()
    train(folder, ranks=2, strategy="ddp", ckpt_path="last", **FLAGS)
    assert_same_run(folder, whole)
    assert_nothing_left(folder, tmp_path / "temporary")


@FULL
@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes_of_its_own(own, train, whole, tmp_path, number):
    """To the end, and until a signal to the first process only: no other is left."""
    folder = tmp_path / "run"
    run = own("run")
    if number:
        wait_for(folder / "checkpoints" / "last", lambda: run.is_running)
        run.send(number)
    expected = {0: 0, signal.SIGKILL: -signal.SIGKILL}.get(number, 128 + number)
    assert run.wait() == expected, run.said()
    run.wait_for_workers(30.0)
    if number:
        train(folder, ranks=2, strategy="ddp", ckpt_path="last", **FLAGS)
    assert_same_run(folder, whole)
