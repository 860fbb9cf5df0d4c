"""`fit --trainer.devices 2` starts its ranks, and leaves none, however the run ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from radixtrain.__main__ import main
from radixtrain.training.devices import launch
from radixtrain.training.devices.launcher_env import PARENT
from tests.support import FULL
from tests.support.processes import fork_children, rank_1_finds_an_error

TWO = {"trainer__devices": 2, "trainer__accelerator": "cpu", "trainer__deterministic": True}
ENDLESS = {**TWO, "trainer__max_epochs": 100_000}


@pytest.fixture
def fit(start, arguments):
    """`fit(**flags)`: a run that has started; its ranks are forked."""

    def run(before=fork_children, **flags):
        return start(arguments(**flags), before=before)

    return run


def lines_of_end(run):
    return [line for line in run.said().splitlines() if line.startswith(("error: ", "stopped by ", "Traceback"))]


@FULL
@pytest.mark.parametrize(
    ("number", "place", "code", "said"),
    [
        (signal.SIGKILL, "rank 0", 1, "error: rank 0 was killed by SIGKILL."),
        (signal.SIGKILL, "rank 1", 1, "error: rank 1 was killed by SIGKILL."),
        (signal.SIGKILL, "parent", -signal.SIGKILL, "stopped by SIGTERM after step"),
        (signal.SIGTERM, "parent", 143, "stopped by SIGTERM after step"),
        (signal.SIGHUP, "rank 1", 129, "stopped by SIGHUP after step"),
        (signal.SIGINT, "parent", 130, "stopped by SIGINT after step"),
    ],
)
def test_a_signal_to_one_process_ends_all(fit, tmp_path, number, place, code, said):
    run = fit(**ENDLESS)
    while not list(tmp_path.glob("out/logs/*/metrics.csv")):
        assert run.is_running, run.said()
        time.sleep(0.01)
    ranks = [pid for pid in run.left() if pid != run.pid]
    assert len(ranks) == 2
    os.kill({"parent": run.pid, "rank 0": ranks[0], "rank 1": ranks[1]}[place], number)
    assert run.wait() == code, run.said()
    run.wait_for_workers(60.0)
    (line,) = lines_of_end(run)
    assert line.startswith(said)


@FULL
@pytest.mark.parametrize(
    ("before", "flags", "said"),
    [
        (rank_1_finds_an_error, {}, "error: rank 1: what only this rank can see"),
        (fork_children, {"model__model_name_or_path": "."}, "error: model.model_name_or_path '.': no weights"),
        (fork_children, {"trainer__devices": "[0,1]", "trainer__strategy": "fsdp"}, "error: trainer.strategy fsdp: "),
    ],
)
def test_an_error_is_told_once(fit, before, flags, said):
    run = fit(before, **{**ENDLESS, **flags})
    assert run.wait() == 1
    (line,) = lines_of_end(run)
    assert line.startswith(said)
    assert not run.left()


def test_a_folder_that_holds_a_run_is_refused_before_ranks_start(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("radixtrain.commands.fit.launch", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr("radixtrain.commands.fit.quiet", lambda speaks: None)  # it would last in this process
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "config.json").touch()
    assert main(arguments(trainer__devices=2, trainer__accelerator="cpu")) == 1
    assert "out holds another run (model/)" in capsys.readouterr().err


def test_ranks_get_the_command_line_and_their_place(environment, monkeypatch):
    """And what they exit with is the end of the run."""
    environment({"OMP_NUM_THREADS": "1"})
    started = []

    def start(command, env, **options):
        started.append((command, env))
        return popen(["sh", "-c", f"exit {codes[len(started) - 1]}"], **options)

    popen, codes = subprocess.Popen, [0, 3, 0]
    monkeypatch.setattr(subprocess, "Popen", start)
    assert launch.launch(["fit", "--trainer.logger=none"], 3) == "rank 1 ended with exit code 3"
    for rank, (command, variables) in enumerate(started):
        assert command == [sys.executable, "-m", "radixtrain", "fit", "--trainer.logger=none"]
        assert (variables["RANK"], variables["WORLD_SIZE"], variables[PARENT]) == (str(rank), "3", str(os.getpid()))
