"""`fit --trainer.devices 2` starts its other process, and leaves none, however the run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from forked_children import fork_children, rank_1_finds_an_error
from lightning.fabric.plugins.environments import LightningEnvironment

from radixtrain.errors import UserError
from radixtrain.training.devices import launch
from radixtrain.training.devices.launch import Processes
from radixtrain.training.devices.started import PARENT

TWO = {"trainer__devices": 2, "trainer__accelerator": "cpu", "trainer__deterministic": True}
ENDLESS = {**TWO, "trainer__max_epochs": 100_000}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def fit(start, arguments, tmp_path):
    """`fit(**flags)`: a run that has started; its children are forked."""

    def run(before=fork_children, **flags):
        return start(arguments(**flags), ENVIRONMENT, before=before)

    return run


def wait_for_a_step(run, folder):
    deadline = time.monotonic() + 100.0
    while not list(folder.glob("logs/*/metrics.csv")):
        assert run.is_running, run.said()
        assert time.monotonic() < deadline, run.said()
        time.sleep(0.05)


def others(run):
    return [pid for pid in run.left() if pid != run.pid]


def errors(run):
    return [line for line in run.said().splitlines() if line.startswith(("error: ", "stopped by ", "Traceback"))]


def test_a_run_ends_with_everything_written_once(fit, tmp_path):
    run = fit(**TWO)
    assert run.wait() == 0, run.said()
    assert not others(run)
    assert not errors(run)
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    assert len(list((tmp_path / "out" / "logs").iterdir())) == 1
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["ranks"] == 2
    assert run.printed().count("tokens/s") == 1
    assert "on 2 ranks" in run.printed()
    assert run.said().count("parameters") == 1


def test_a_rank_that_is_killed_ends_the_run(fit, tmp_path):
    run = fit(**ENDLESS)
    wait_for_a_step(run, tmp_path / "out")
    (child,) = others(run)
    os.kill(child, signal.SIGKILL)
    assert run.wait(60) == 1
    (line,) = errors(run)
    assert line.startswith("error: rank 1 was killed by SIGKILL.")
    assert not others(run)


def test_a_first_rank_that_is_killed_leaves_none(fit, tmp_path):
    run = fit(**ENDLESS)
    wait_for_a_step(run, tmp_path / "out")
    run.send(signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    run.wait_for_workers(30.0)
    (line,) = errors(run)
    assert line.startswith("error: rank 1: rank 0 is gone")


def test_a_signal_to_the_first_rank_saves_once_and_ends_both(fit, tmp_path):
    run = fit(**ENDLESS)
    wait_for_a_step(run, tmp_path / "out")
    run.send(signal.SIGTERM)
    assert run.wait(60) == 143
    assert not others(run)
    (line,) = errors(run)
    assert line.startswith("stopped by SIGTERM after step")


def test_an_error_of_another_rank_is_told_by_it(fit):
    run = fit(rank_1_finds_an_error, **ENDLESS)
    assert run.wait(60) == 1
    assert errors(run) == ["error: rank 1: what only this rank can see"]
    assert not others(run)


def test_a_mistake_is_found_before_another_process_is_started(fit, tmp_path):
    """There would be a second line on stderr, or a process that is still there."""
    run = fit(model__model_name_or_path=tmp_path, **TWO)
    assert run.wait(60) == 1
    (line,) = errors(run)
    assert "no weights" in line
    assert not others(run)


class TestProcesses:
    @pytest.fixture
    def strategy(self, monkeypatch):
        for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", PARENT):
            monkeypatch.delenv(name, raising=False)
        return SimpleNamespace(cluster_environment=LightningEnvironment(), num_processes=3)

    def test_children_get_the_real_command_line_and_their_place(self, strategy, monkeypatch):
        """A logger's key is masked in this process only once it was read."""
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        made, before = [], dict(os.environ)
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: made.append((*args, options)) or Child())
        arguments = ["fit", "--trainer.logger.init_args.api_key=abc"]
        with Processes(strategy, arguments, timedelta(seconds=5)) as processes:
            assert processes.starts_others
            processes.__class__.__dict__["_start"](processes)
            assert not processes.starts_others  # Lightning is told so too
            assert os.environ["LOCAL_RANK"] == "0"
        assert os.environ == before
        assert [command for command, _ in made] == [[sys.executable, "-m", "radixtrain", *arguments]] * 2
        places = [options["env"] for _, options in made]
        assert [place["LOCAL_RANK"] for place in places] == ["1", "2"]
        assert {place["WORLD_SIZE"] for place in places} == {"3"}
        assert len({(place["MASTER_ADDR"], place["MASTER_PORT"], place[PARENT]) for place in places}) == 1

    def test_a_process_that_was_started_starts_none(self, strategy, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert not Processes(strategy, ["fit"], timedelta(seconds=5)).starts_others

    def test_a_strategy_of_one_device_starts_none(self):
        processes = Processes(SimpleNamespace(), ["fit"], timedelta(seconds=5))
        assert not processes.starts_others
        with processes:
            assert processes.joined(lambda: "made") == "made"


@pytest.mark.parametrize(("tasks", "error"), [("2(x2)", UserError), ("4", RuntimeError)])
def test_machines_that_gloo_does_not_connect(environment, monkeypatch, tasks, error):
    """On one machine it is no matter of its network."""
    environment({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": tasks})

    def join(timeout):
        raise RuntimeError("Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] no error")

    monkeypatch.setattr(launch, "join", join)
    with pytest.raises(error, match="connectFullMesh") as caught:
        Processes(SimpleNamespace(), ["fit"], timedelta(seconds=5)).joined(lambda: "made")
    assert ("GLOO_SOCKET_IFNAME" in str(caught.value)) == (error is UserError)


class Child:
    """A process that ends at once."""

    returncode = 0

    def poll(self):
        return 0

    def wait(self, timeout=None):
        return 0

    def kill(self):
        pass
