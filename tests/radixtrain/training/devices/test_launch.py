"""`fit --trainer.devices 2` starts its other process, and leaves none, however the run ends."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from changed_runs import fork_children, rank_1_finds_an_error
from lightning.fabric import Fabric
from outcomes import summary
from tiers import FULL

from radixtrain.errors import UserError
from radixtrain.training.devices import launch
from radixtrain.training.devices.launch import Processes
from radixtrain.training.devices.launcher_env import PARENT

TWO = {"trainer__devices": 2, "trainer__accelerator": "cpu", "trainer__deterministic": True}
ENDLESS = {**TWO, "trainer__max_epochs": 100_000}


@pytest.fixture
def fit(start, arguments, tmp_path):
    """`fit(**flags)`: a run that has started; its children are forked."""

    def run(before=fork_children, **flags):
        return start(arguments(**flags), before=before)

    return run


def others(run):
    return [pid for pid in run.left() if pid != run.pid]


def errors(run):
    return [line for line in run.said().splitlines() if line.startswith(("error: ", "stopped by ", "Traceback"))]


@FULL
def test_a_run_ends_with_everything_written_once(fit, tmp_path):
    run = fit(**TWO)
    assert run.wait() == 0, run.said()
    assert not others(run)
    assert not errors(run)
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    assert len(list((tmp_path / "out" / "logs").iterdir())) == 1
    assert summary(tmp_path / "out")["ranks"] == 2
    assert run.printed().count("tokens/s") == 1
    assert "on 2 ranks" in run.printed()
    assert run.said().count("parameters") == 1


@FULL
@pytest.mark.parametrize(
    ("number", "is_to_child", "code", "said"),
    [
        (signal.SIGKILL, True, 1, "error: rank 1 was killed by SIGKILL."),
        (signal.SIGKILL, False, -signal.SIGKILL, "error: rank 1: rank 0 is gone"),
        (signal.SIGTERM, False, 143, "stopped by SIGTERM after step"),
    ],
)
def test_a_signal_to_one_ends_both(fit, tmp_path, number, is_to_child, code, said):
    run = fit(**ENDLESS)
    while not list(tmp_path.glob("out/logs/*/metrics.csv")):
        assert run.is_running, run.said()
        time.sleep(0.01)
    (child,) = others(run)
    os.kill(child if is_to_child else run.pid, number)
    assert run.wait() == code
    run.wait_for_workers(60.0)
    (line,) = errors(run)
    assert line.startswith(said)


@FULL
def test_an_error_of_another_rank_is_told_by_it(fit):
    run = fit(rank_1_finds_an_error, **ENDLESS)
    assert run.wait() == 1
    assert errors(run) == ["error: rank 1: what only this rank can see"]
    assert not others(run)


@FULL
def test_a_mistake_is_found_before_another_process_is_started(fit, tmp_path):
    """There would be a second line on stderr, or a process that is still there."""
    run = fit(model__model_name_or_path=tmp_path, **TWO)
    assert run.wait() == 1
    (line,) = errors(run)
    assert "no weights" in line
    assert not others(run)


class Started(Exception):
    """In place of a process: with what it would have been started."""


def test_children_get_the_command_line_and_their_place(environment, monkeypatch):
    def start(command, env, **_):
        raise Started(command, env)

    environment({"OMP_NUM_THREADS": "1"})
    before, arguments = dict(os.environ), ["fit", "--trainer.logger=none"]
    monkeypatch.setattr(subprocess, "Popen", start)
    strategy = Fabric(accelerator="cpu", devices=3, strategy="ddp").strategy
    with pytest.raises(Started) as started, Processes(strategy, arguments, timedelta(seconds=5)) as processes:
        assert processes.starts_others
        processes.joined(lambda: "made")
    command, variables = started.value.args
    assert command == [sys.executable, "-m", "radixtrain", *arguments]
    assert (variables["LOCAL_RANK"], variables["WORLD_SIZE"], variables[PARENT]) == ("1", "3", str(os.getpid()))
    assert os.environ == before


@pytest.mark.parametrize(("num_nodes", "error"), [(2, UserError), (1, RuntimeError)])
def test_machines_that_gloo_does_not_connect(monkeypatch, num_nodes, error):
    """On one machine it is no matter of its network. The trainer knows their number while srun's names are hidden."""
    strategy = SimpleNamespace(num_nodes=num_nodes)

    def join(timeout):
        raise RuntimeError("Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] no error")

    monkeypatch.setattr(launch, "join", join)
    with pytest.raises(error, match="connectFullMesh") as caught:
        Processes(strategy, ["fit"], timedelta(seconds=5)).joined(lambda: "made")
    assert ("GLOO_SOCKET_IFNAME" in str(caught.value)) == (error is UserError)
