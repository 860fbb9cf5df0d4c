"""The devices and strategies of Lightning's trainer that a command accepts; every other is refused by name."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from radixtrain.distributed import NCCL_LATER, check_sp_size
from radixtrain.errors import UserError, did_you_mean
from radixtrain.settings.fields import value_of
from radixtrain.training.devices.launcher_env import ON_SEVERAL, LauncherEnv, is_launched, launcher_env, one_device

if TYPE_CHECKING:
    import lightning as L


FIRST_PORT = 15_000  # for the ranks of SLURM jobs to meet at
DDP = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
ACCEPTED = ("auto", *DDP, "fsdp2")


# Prefixes of Lightning's names that are refused, the longest first, and what to use instead.
REFUSED = {
    "ddp_notebook": "it forks a process that has imported CUDA; ddp starts new ones",
    "ddp_fork": "it forks a process that has imported CUDA; ddp starts new ones",
    "ddp_spawn": "it cannot start processes before the data are read; set it to ddp",
    "deepspeed": "fsdp2 divides weights, gradients and moments too",
    "fsdp": "this is FSDP1, which torch is to remove; set it to fsdp2",
    "model_parallel": "set it to fsdp2",
    "single_": "leave it out, and set trainer.devices to 1",
    "xla": "radixtrain runs on CUDA and on CPUs",
}


# Keys that need whole weights outside of a forward pass, by the commands that read them.
WHOLE = {
    "model.load_in_4bit": ON_SEVERAL,
    "model.verify_first_batch": ("fit",),
    "model.generate": ("predict",),
    "evaluate_generation.metric": ("fit", "validate"),
}


SPLITTING = ("fit", "validate", "test")  # commands that split a micro-batch over the ranks of `sp_size`


def sp_size_of(settings: Any, command: str) -> int:
    """Return how many ranks compute each micro-batch together; 1 for commands that compute whole sequences."""
    return int(settings.sp_size) if command in SPLITTING else 1


def device_settings(settings: Any, command: str) -> dict[str, Any]:
    """Return the arguments that Lightning's trainer receives in place of the configured ones.

    settings: of a command, as parsed. Raises UserError for what cannot run.
    """
    config, fixed = settings.trainer, {"use_distributed_sampler": False}
    if command not in ON_SEVERAL:
        return {**fixed, **one_device(config, command)}
    _check_strategy(config.strategy)
    if config.strategy == "fsdp2":
        _check_sharded(settings, command)
    if sp_size_of(settings, command) > 1:
        _check_split(settings, command)
    if not is_launched():
        if config.num_nodes > 1:
            raise UserError(
                f"trainer.num_nodes {config.num_nodes}: start the command on each machine with torchrun, or with srun; "
                f"then leave trainer.num_nodes and trainer.devices out"
            )
        return fixed
    changed: dict[str, Any] = {"devices": launcher_env().local_size} if config.devices in ("auto", -1, "-1") else {}
    if launcher_env().by == "srun":
        _check_visible(config.accelerator)
        changed["plugins"] = [SlurmTasks(launcher_env())]
    return {**fixed, **changed}


def check_devices(trainer: L.Trainer, timeout: timedelta, sp_size: int = 1) -> None:
    """Raise UserError if what Lightning made of the settings cannot run here; complete the strategy.

    timeout: how long a rank waits for the others. sp_size: of these ranks, see `sp_size_of`.
    """
    strategy, launcher = trainer.strategy, launcher_env()
    if isinstance(strategy, DDPStrategy):
        is_nccl = any(device.type == "cuda" for device in strategy.parallel_devices or ())
        strategy._timeout = timeout + NCCL_LATER if is_nccl else timeout
        # Otherwise gradients are held twice.
        strategy._ddp_kwargs["gradient_as_bucket_view"] = True
    elif not isinstance(strategy, SingleDeviceStrategy):
        raise UserError(f"trainer.strategy {type(strategy).__name__}: use {' or '.join(ACCEPTED[1:])}")
    devices = (trainer.num_devices, trainer.num_nodes)
    if is_launched() and devices != (launcher.local_size, launcher.num_nodes):
        raise UserError(
            f"trainer.devices {devices[0]} and trainer.num_nodes {devices[1]}: {launcher.by} has started "
            f"{launcher.local_size} processes on each of {launcher.num_nodes} machines; leave both keys out"
        )
    check_sp_size(sp_size, devices[0] * devices[1])


def _check_strategy(strategy: str) -> None:
    """Refuse a strategy that is not accepted."""
    if strategy not in ACCEPTED:
        refused = next((name for name in REFUSED if strategy.startswith(name)), None)
        meant = f"no such strategy{did_you_mean(strategy, ACCEPTED)}; there are {', '.join(ACCEPTED)}"
        raise UserError(f"trainer.strategy {strategy}: {REFUSED[refused] if refused else meant}")


def _check_visible(accelerator: str) -> None:
    """Raise UserError if SLURM shows each task only its own GPUs: rank N of a machine takes its GPU N."""
    num_visible, num_tasks = torch.cuda.device_count(), launcher_env().local_size
    if accelerator in ("auto", "gpu", "cuda") and 0 < num_visible < num_tasks:
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


class SlurmTasks(TorchElasticEnvironment):
    """The tasks that `srun` has started, in the form in which Lightning knows torchrun's processes.

    Lightning's `SLURMEnvironment` also saves and requeues at signals, as `Requests` does here, resumes fresh runs, and
    refuses `--ntasks` without `--ntasks-per-node`. SLURM's variables are read here once: Lightning
    does not see them while it trains.

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
        """Do nothing: `check_devices` validates the settings."""
