"""Tasks of SLURM as ranks of Lightning's DDP."""

import pytest

from radixtrain.training.devices.launcher_env import LauncherEnv
from radixtrain.training.devices.settings import SlurmTasks

TASK = LauncherEnv("srun", 5, 8, 1, 4)


@pytest.fixture(autouse=True)
def job(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "123456", "SLURM_NODELIST": "gpu[07-09,12]", "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)


def test_ranks_and_place():
    tasks = SlurmTasks(TASK)
    assert (tasks.world_size(), tasks.global_rank(), tasks.local_rank(), tasks.node_rank()) == (8, 5, 1, 1)
    assert (tasks.main_address, tasks.main_port) == ("gpu07", 18456)
    assert tasks.creates_processes_externally
    assert not SlurmTasks.detect()


def test_the_step_and_the_user_decide_about_the_place(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu09")
    assert SlurmTasks(TASK).main_address == "gpu09"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert (SlurmTasks(TASK).main_address, SlurmTasks(TASK).main_port) == ("10.0.0.1", 1234)


def test_it_does_not_ask_slurm_again(monkeypatch):
    """Lightning is not to know of SLURM while it trains."""
    tasks = SlurmTasks(TASK)
    for name in ("SLURM_NTASKS", "SLURM_NODELIST", "SLURM_NODEID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    tasks.set_world_size(1)
    tasks.set_global_rank(0)
    assert (tasks.world_size(), tasks.global_rank(), tasks.main_port) == (8, 5, 18456)
