"""Lightning Fabric for a command: its device or devices, its precision, and how the ranks share a model.

What a command does not accept is refused by name.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from radixtrain.distributed import NCCL_LATER, check_sp_size
from radixtrain.errors import UserError, did_you_mean, first_line
from radixtrain.settings.commands import RunSettings
from radixtrain.settings.fields import value_of
from radixtrain.training.devices.fsdp2 import METHODS, shard
from radixtrain.training.devices.launcher_env import ON_SEVERAL, LauncherEnv, is_launched, launcher_env, one_device

KEYS = ("accelerator", "devices", "precision")  # of `trainer`, which Fabric takes
FIRST_PORT = 15_000  # for the ranks of SLURM jobs to meet at
ACCEPTED = ("auto", "ddp", "fsdp2")
INSTEAD_OF = {  # beginnings of Lightning's names, and what to use instead
    "ddp_": "set it to ddp",
    "deepspeed": "fsdp2 divides weights, gradients and moments too",
    "fsdp": "this is FSDP1, which torch is to remove; set it to fsdp2",
}
# Keys that need whole weights outside of a forward pass, by the commands that read them.
WHOLE = {
    "model.load_in_4bit": ON_SEVERAL,
    "model.verify_first_batch": ("fit",),
    "model.generate": ("predict",),
    "evaluate_generation.metric": ("fit", "validate"),
}
SPLITTING = ("fit", "validate", "test")  # commands that split a micro-batch over the ranks of `sp_size`


class Sharded(DDPStrategy):
    """FSDP2: weights, gradients and moments are divided among the ranks; processes and devices are as for DDP.

    Fabric's `ModelParallelStrategy` makes a mesh of nodes x devices, with tensor parallelism inside a node.
    """

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `setup_module` moves only the part of each rank."""

    def setup_module(self, module: Any) -> Any:
        shard(module, module.model, self.root_device, self.world_size, METHODS)
        return module


def fabric_of(settings: RunSettings, command: str) -> Fabric:
    """Make Fabric for a command. Raises UserError if the devices, the strategy or the precision cannot be had here."""
    changed = device_settings(settings, command)
    given = {name: changed.get(name, getattr(settings.trainer, name)) for name in KEYS}
    given |= {"plugins": [_environment()], "num_nodes": changed.get("num_nodes", launcher_env().num_nodes)}
    name = changed.get("strategy", settings.trainer.strategy)
    try:
        fabric = Fabric(**given)
        if name != "auto" or not isinstance(fabric.strategy, SingleDeviceStrategy):
            timeout = timedelta(seconds=settings.ddp_timeout)
            if isinstance(fabric.accelerator, CUDAAccelerator):
                timeout += NCCL_LATER
            fabric = Fabric(**given, strategy=(Sharded if name == "fsdp2" else DDPStrategy)(timeout=timeout))
    except (ValueError, TypeError, RuntimeError, ModuleNotFoundError, OverflowError) as error:
        raise UserError(f"trainer: {first_line(error)}") from None
    _check_devices(fabric, sp_size_of(settings, command))
    return fabric


def is_sharded(strategy: object) -> bool:
    """Return whether each rank holds only a part of the weights."""
    return isinstance(strategy, Sharded)


def sp_size_of(settings: Any, command: str) -> int:
    """Return how many ranks compute each micro-batch together; 1 for commands that compute whole sequences."""
    return int(settings.sp_size) if command in SPLITTING else 1


def device_settings(settings: Any, command: str) -> dict[str, Any]:
    """Return the arguments that Fabric receives in place of the configured ones.

    settings: of a command, as parsed. Raises UserError for what cannot run.
    """
    config = settings.trainer
    if command not in ON_SEVERAL:
        return one_device(config, command)
    _check_strategy(config.strategy)
    if config.strategy == "fsdp2":
        _check_sharded(settings, command)
    if sp_size_of(settings, command) > 1:
        _check_split(settings, command)
    if launcher_env().by == "srun":
        _check_visible(config.accelerator)
    return {"devices": launcher_env().local_size} if is_launched() and config.devices == "auto" else {}


def _check_strategy(strategy: str) -> None:
    """Refuse a strategy that is not accepted."""
    if strategy not in ACCEPTED:
        refused = next((name for name in INSTEAD_OF if strategy.startswith(name)), None)
        meant = f"no such strategy{did_you_mean(strategy, ACCEPTED)}; there are {', '.join(ACCEPTED)}"
        raise UserError(f"trainer.strategy {strategy}: {INSTEAD_OF[refused] if refused else meant}")


def _check_visible(accelerator: str) -> None:
    """Raise UserError if SLURM shows each task only its own GPUs: rank N of a machine takes its GPU N."""
    num_visible, num_tasks = torch.cuda.device_count(), launcher_env().local_size
    if accelerator in ("auto", "cuda") and 0 < num_visible < num_tasks:
        raise UserError(
            f"srun has started {num_tasks} tasks on this machine, and this one sees {num_visible} of its GPUs; every "
            f"task must see all: replace --gpus-per-task and --gpu-bind by --gpus-per-node={num_tasks}"
        )


def _check_sharded(settings: object, command: str) -> None:
    for key, commands in WHOLE.items():
        if command in commands and value_of(settings, key):
            raise UserError(f"{key} does not work with trainer.strategy fsdp2, which divides the weights; use ddp")


def _check_split(settings: Any, command: str) -> None:
    if not settings.dedup:
        raise UserError(f"sp_size {settings.sp_size}: only unique rows are split, and dedup is false; set sp_size: 1")
    if command == "fit" and settings.model.verify_first_batch:
        raise UserError(
            f"model.verify_first_batch does not work with sp_size {settings.sp_size}, since a single rank compares; "
            f"leave it out, and run the command verify"
        )


def _check_devices(fabric: Fabric, sp_size: int) -> None:
    """Raise UserError if the configured devices are not those that a launcher has started, or cannot be grouped."""
    strategy, launcher = fabric.strategy, launcher_env()
    devices = getattr(strategy, "num_processes", 1)
    if is_launched() and devices != launcher.local_size:
        raise UserError(
            f"trainer.devices {devices}: {launcher.by} has started {launcher.local_size} processes on this machine; "
            f"leave trainer.devices out"
        )
    check_sp_size(sp_size, devices * launcher.num_nodes)


def _environment() -> ClusterEnvironment:
    """Tell Lightning what has started this process. It would take a job of SLURM for `srun`."""
    if launcher_env().by == "srun":
        return SlurmTasks(launcher_env())
    return TorchElasticEnvironment() if is_launched() else LightningEnvironment()


class SlurmTasks(TorchElasticEnvironment):
    """The tasks that `srun` has started, in the form in which Lightning knows torchrun's processes.

    Lightning's `SLURMEnvironment` also saves and requeues at signals, as `Requests` does here, resumes fresh runs, and
    refuses `--ntasks` without `--ntasks-per-node`.

    task: this one. The host of rank 0 is the first one of the step, unless MASTER_ADDR and MASTER_PORT name a place.
    """

    def __init__(self, task: LauncherEnv):
        super().__init__()
        self.task, self.node = task, int(os.environ.get("SLURM_NODEID", "0"))
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1")
        self.address = os.environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes)
        port = FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % 10_000
        self.port = int(os.environ.get("MASTER_PORT", port))

    @property
    def main_address(self) -> str:
        return self.address

    @property
    def main_port(self) -> int:
        return self.port

    def world_size(self) -> int:
        return self.task.size

    def global_rank(self) -> int:
        return self.task.rank

    def local_rank(self) -> int:
        return self.task.local_rank

    def node_rank(self) -> int:
        return self.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: `_check_devices` validates the settings."""
