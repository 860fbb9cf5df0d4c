"""Which devices and strategies a command takes, in the words of a user."""

from datetime import timedelta

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.settings.read import read
from radixtrain.training.devices import fabric
from radixtrain.training.devices.fabric import fabric_of
from radixtrain.training.devices.launcher_env import LauncherEnv, default_devices
from radixtrain.training.devices.settings import SlurmTasks, device_settings

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x2)"}


pytestmark = pytest.mark.usefixtures("environment")


def settings(**keys):
    """Settings of a run with some keys, in which `__` stands for a dot."""
    given = {"model.model_name_or_path": "x", **{key.replace("__", "."): value for key, value in keys.items()}}
    return read("fit", [f"--{key}={value}" for key, value in given.items()])


def test_accepted():
    for name in ("auto", "ddp", "fsdp2"):
        assert device_settings(settings(trainer__strategy=name), "fit") == {}


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("fsdp", "set it to fsdp2"),
        ("fsdp_cpu_offload", "set it to fsdp2"),
        ("ddp_spawn", "set it to ddp"),
        ("ddp_fork_find_unused_parameters_true", "ddp starts new ones"),
        ("ddp_notebook", "ddp starts new ones"),
        ("deepspeed_stage_2", "fsdp2 divides"),
        ("model_parallel", "set it to fsdp2"),
        ("xla", "on CUDA and on CPUs"),
        ("dpp", "no such strategy, did you mean ddp"),
    ],
)
def test_refused_by_name(name, way_out):
    with pytest.raises(UserError, match=f"trainer.strategy {name}: .*{way_out}"):
        device_settings(settings(trainer__strategy=name), "fit")


@pytest.mark.parametrize(
    ("key", "value", "command", "other"),
    [
        ("model__load_in_4bit", True, "fit", None),
        ("model__verify_first_batch", True, "fit", "validate"),
        ("model__generate", True, "predict", "fit"),
        ("evaluate_generation__metric", "exact_match", "validate", "test"),
    ],
)
def test_what_needs_whole_weights_is_refused_with_fsdp2(key, value, command, other):
    with pytest.raises(UserError, match=f"{key.replace('__', '.')} does not work with trainer.strategy fsdp2"):
        device_settings(settings(trainer__strategy="fsdp2", **{key: value}), command)
    device_settings(settings(trainer__strategy="ddp", **{key: value}), command)
    if other:
        device_settings(settings(trainer__strategy="fsdp2", **{key: value}), other)


@pytest.mark.parametrize(
    ("devices", "taken", "is_said"),
    [
        (1, 1, False),
        ("auto", 1, False),
        (0, 0, False),
        (4, 1, True),
        ("4", 1, True),
        ([2, 3], [2], True),
        ("2,3", [2], True),
    ],
)
def test_verify_takes_the_first_device(devices, taken, is_said, caplog):
    with caplog.at_level("INFO"):
        found = device_settings(settings(trainer__devices=devices, trainer__strategy="deepspeed"), "verify")
    assert (found["devices"], found["num_nodes"], found["strategy"]) == (taken, 1, "auto")
    assert bool(caplog.messages) == is_said
    assert all(message.startswith("verify runs on one device") for message in caplog.messages)


def test_machines_need_a_launcher(environment):
    with pytest.raises(UserError, match="num_nodes 2: start the command on each machine with torchrun, or with srun"):
        device_settings(settings(trainer__num_nodes=2), "fit")
    environment(TORCHRUN)
    device_settings(settings(trainer__num_nodes=2), "fit")


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
def test_a_launcher_says_how_many(environment, variables):
    assert default_devices() == {}
    environment(variables)
    assert default_devices() == {"trainer.devices": 2, "trainer.num_nodes": 2}
    for devices in ("auto", -1):
        assert device_settings(settings(trainer__devices=devices), "fit")["devices"] == 2


TWO = {"trainer__accelerator": "cpu", "trainer__devices": 2}


def test_a_number_that_is_not_the_launchers_is_refused(environment):
    assert fabric_of(settings(**TWO), "fit").world_size == 2
    environment(TORCHRUN)
    with pytest.raises(UserError, match=r"devices 2 and trainer\.num_nodes 1: torchrun has started 2"):
        fabric_of(settings(**TWO), "fit")


def test_srun_is_told_to_lightning(environment):
    environment(SRUN)
    (tasks,) = device_settings(settings(), "fit")["plugins"]
    assert isinstance(tasks, SlurmTasks)
    strategy = fabric_of(settings(**TWO, trainer__num_nodes=2), "fit").strategy
    assert (strategy.global_rank, strategy.num_processes * strategy.num_nodes) == (1, 4)


@pytest.mark.parametrize("is_cuda", [False, True])
def test_nccl_waits_longer_than_what_reports_a_hanging_rank(is_cuda, monkeypatch):
    if is_cuda:
        monkeypatch.setattr(fabric, "CUDAAccelerator", CPUAccelerator)  # the accelerator of these ranks stands for it
    strategy = fabric_of(settings(**TWO, ddp_timeout=7), "fit").strategy
    assert vars(strategy)["_timeout"] == timedelta(seconds=67 if is_cuda else 7)


@pytest.mark.parametrize(("devices", "count"), [(1, "1 rank"), (3, "3 ranks")])
def test_ranks_that_sp_size_does_not_divide(devices, count):
    with pytest.raises(UserError, match=rf"sp_size 2: this run has {count}, which it has to divide: 1"):
        fabric_of(settings(sp_size=2, **TWO | {"trainer__devices": devices}), "fit")


@pytest.mark.parametrize(
    ("keys", "other"), [({"dedup": False}, "predict"), ({"model__verify_first_batch": True}, "test")]
)
def test_what_cannot_be_split_is_refused(keys, other):
    with pytest.raises(UserError, match="sp_size 2"):
        device_settings(settings(sp_size=2, trainer__devices=2, **keys), "fit")
    device_settings(settings(sp_size=2, trainer__devices=2, **keys), other)


def test_tasks_that_do_not_see_all_gpus(environment, monkeypatch):
    """Two tasks on each machine."""
    environment(SRUN)
    for accelerator, visible in (("cpu", 1), ("auto", 0), ("auto", 2), ("auto", 1), ("gpu", 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        given = settings(trainer__accelerator=accelerator, trainer__devices=2)
        if accelerator == "cpu" or visible != 1:
            assert "plugins" in device_settings(given, "fit")
            continue
        with pytest.raises(UserError, match=r"2 tasks on this machine, and this one sees 1 of .* --gpus-per-node=2"):
            device_settings(given, "fit")


def test_the_command_line_says_so_in_one_line(arguments, capsys, tmp_path):
    for flags, said in (
        ({"trainer__strategy": "deepspeed"}, "trainer.strategy deepspeed: fsdp2 divides"),
        ({"trainer__devices": 100_000}, "trainer.devices must be at most 1,000; got 100000"),
        ({"ddp_timeout": 0}, "ddp_timeout must be at least 1; got 0"),
    ):
        assert main(arguments(**flags)) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_tasks_of_slurm(monkeypatch):
    """They meet on the first host of the step, or where the user says; SLURM's variables are read once."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "123456", "SLURM_NODELIST": "gpu[07-09,12]", "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)
    task = LauncherEnv("srun", 5, 8, 1, 4)
    tasks = SlurmTasks(task)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu09")
    assert SlurmTasks(task).main_address == "gpu09"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert (SlurmTasks(task).main_address, SlurmTasks(task).main_port) == ("10.0.0.1", 1234)
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_NODELIST", "SLURM_NODEID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name)
    assert (tasks.world_size(), tasks.global_rank(), tasks.local_rank(), tasks.node_rank()) == (8, 5, 1, 1)
    assert (tasks.main_address, tasks.main_port) == ("gpu07", 18456)
    assert tasks.creates_processes_externally and not SlurmTasks.detect()
