"""Which devices and strategies a command takes, in the words of a user."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins.environments import SLURMEnvironment

from radixtrain.errors import UserError
from radixtrain.settings.read import read
from radixtrain.training.devices import fabric
from radixtrain.training.devices.fabric import SlurmTasks, device_settings, fabric_of
from radixtrain.training.devices.launcher_env import LauncherEnv, default_devices

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x2)"}
SHORT = {
    "CPUS": "--trainer.accelerator=cpu --trainer.devices=2",
    "FSDP2": "--trainer.accelerator=cpu --trainer.devices=2 --trainer.strategy=fsdp2",
    "SPLIT": "--trainer.accelerator=cpu --trainer.devices=2 --sp_size=2",
    "METRIC": "--evaluate_generation.metric=exact_match",
    "VERIFY": "--model.verify_first_batch=true",
}
pytestmark = pytest.mark.usefixtures("environment")


def settings(typed):
    """Settings of a run with some keys."""
    for short, words in SHORT.items():
        typed = typed.replace(short, words)
    return read("fit", ["--model.model_name_or_path=x", *typed.split()])


# What is typed, after torchrun or not -> what is said; empty if it is accepted.
GIVEN = {
    **{f"fit CPUS --trainer.strategy={name}": "" for name in ("auto", "ddp", "fsdp2")},
    "fit --trainer.strategy=fsdp": "trainer.strategy fsdp: .*set it to fsdp2",
    "fit --trainer.strategy=ddp_spawn": "trainer.strategy ddp_spawn: set it to ddp",
    "fit --trainer.strategy=deepspeed_stage_2": "trainer.strategy deepspeed_stage_2: fsdp2 divides",
    "fit --trainer.strategy=dpp": "trainer.strategy dpp: no such strategy, did you mean ddp",
    "fit FSDP2 --model.load_in_4bit=true": "model.load_in_4bit does not work with trainer.strategy fsdp2",
    "fit FSDP2 VERIFY": "verify_first_batch does not work with trainer.strategy",
    "validate FSDP2 VERIFY": "",
    "predict FSDP2 --model.generate=true": "model.generate does not work with trainer.strategy fsdp2",
    "fit FSDP2 --model.generate=true": "",
    "validate FSDP2 METRIC": "evaluate_generation.metric does not",
    "test FSDP2 METRIC": "",
    "fit CPUS --trainer.num_nodes=2": "num_nodes: torchrun or srun starts the ranks of several machines",
    "torchrun fit CPUS": "",
    "torchrun fit CPUS --trainer.devices=3": r"trainer\.devices 3: torchrun has started 2 processes on this",
    "fit SPLIT": "",
    "fit SPLIT --trainer.devices=1": "sp_size 2: this run has 1 rank, which it has to divide: 1",
    "fit SPLIT --trainer.devices=3": "sp_size 2: this run has 3 ranks, which it has to divide: 1",
    "fit SPLIT --dedup=false": "sp_size 2: only unique rows are split",
    "predict SPLIT --dedup=false": "",
    "fit SPLIT VERIFY": "verify_first_batch does not work with sp_size 2",
}


@pytest.mark.parametrize("typed", GIVEN)
def test_accepted_or_refused(environment, typed):
    environment(TORCHRUN if typed.startswith("torchrun") else {})
    command, _, keys = typed.removeprefix("torchrun ").partition(" ")
    with pytest.raises(UserError, match=GIVEN[typed]) if GIVEN[typed] else nullcontext():
        fabric_of(settings(keys), command)


@pytest.mark.parametrize(
    ("devices", "taken", "is_said"),
    [("1", 1, False), ("auto", 1, False), ("[1]", [1], False), ("4", 1, True), ("[2,3]", [2], True)],
)
def test_verify_takes_the_first_device(devices, taken, is_said, caplog):
    with caplog.at_level("INFO"):
        found = device_settings(settings(f"--trainer.devices={devices} --trainer.strategy=deepspeed"), "verify")
    assert (found["devices"], found["num_nodes"], found["strategy"]) == (taken, 1, "auto")
    assert [message[:26] for message in caplog.messages] == ["verify runs on one device:"] * is_said


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
def test_a_launcher_says_how_many(environment, variables):
    assert default_devices() == {}
    environment(variables)
    assert default_devices() == {"trainer.devices": 2}
    strategy = fabric_of(settings("CPUS --trainer.devices=auto"), "fit").strategy
    assert (strategy.global_rank, strategy.num_processes * strategy.num_nodes) == (1, 4)
    assert isinstance(strategy.cluster_environment, SlurmTasks) == (variables is SRUN)


def test_a_job_of_slurm_without_srun_is_one_process(environment):
    """Which Lightning would take for one of its tasks."""
    environment({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"})
    assert SLURMEnvironment.detect()
    assert fabric_of(settings("--trainer.accelerator=cpu"), "fit").world_size == 1


@pytest.mark.parametrize("is_cuda", [False, True])
def test_nccl_waits_longer_than_what_reports_a_hanging_rank(is_cuda, monkeypatch):
    if is_cuda:
        monkeypatch.setattr(fabric, "CUDAAccelerator", CPUAccelerator)  # the accelerator of these ranks stands for it
    strategy = fabric_of(settings("CPUS --ddp_timeout=7"), "fit").strategy
    assert vars(strategy)["_timeout"] == timedelta(seconds=67 if is_cuda else 7)


@pytest.mark.parametrize(
    ("accelerator", "num_visible", "is_refused"),
    [("cpu", 1, False), ("auto", 0, False), ("auto", 2, False), ("auto", 1, True), ("cuda", 1, True)],
)
def test_tasks_that_do_not_see_all_gpus(environment, monkeypatch, accelerator, num_visible, is_refused):
    """Two tasks on each machine."""
    environment(SRUN)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    said = r"2 tasks on this machine, and this one sees 1 of .* --gpus-per-node=2"
    with pytest.raises(UserError, match=said) if is_refused else nullcontext():
        device_settings(settings(f"--trainer.accelerator={accelerator} --trainer.devices=2"), "fit")


def test_tasks_of_slurm(monkeypatch):
    """They meet on the first host of the step, or where the user says; SLURM's variables are read once."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "123456", "SLURM_NODELIST": "gpu[07-09,12]", "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)
    task = LauncherEnv("srun", 5, 8, 1, 4)
    tasks = SlurmTasks(task)
    assert (tasks.world_size(), tasks.global_rank(), tasks.local_rank(), tasks.node_rank()) == (8, 5, 1, 1)
    assert (tasks.main_address, tasks.main_port) == ("gpu07", 18456)
    assert tasks.creates_processes_externally and not SlurmTasks.detect()
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu09")
    assert SlurmTasks(task).main_address == "gpu09"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert (SlurmTasks(task).main_address, SlurmTasks(task).main_port) == ("10.0.0.1", 1234)
