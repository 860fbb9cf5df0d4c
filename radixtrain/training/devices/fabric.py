"""Lightning Fabric for a command: its device or devices, its precision, and how the ranks share a model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from radixtrain.distributed import NCCL_LATER, check_sp_size
from radixtrain.errors import UserError, first_line
from radixtrain.settings.commands import RunSettings
from radixtrain.training.devices.fsdp2 import METHODS, shard
from radixtrain.training.devices.launcher_env import is_launched, launcher_env
from radixtrain.training.devices.settings import device_settings, sp_size_of

KEYS = ("accelerator", "devices", "num_nodes", "precision")  # of `trainer`, which Fabric takes


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
    given["plugins"] = changed.get("plugins")
    name = changed.get("strategy", settings.trainer.strategy)
    if isinstance(given["devices"], str) and "," in given["devices"]:
        given["devices"] = [int(number) for number in given["devices"].split(",") if number.strip()]
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


def _check_devices(fabric: Fabric, sp_size: int) -> None:
    """Raise UserError if the configured devices are not those that a launcher has started, or cannot be grouped."""
    strategy, launcher = fabric.strategy, launcher_env()
    devices = getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)
    if is_launched() and devices != (launcher.local_size, launcher.num_nodes):
        raise UserError(
            f"trainer.devices {devices[0]} and trainer.num_nodes {devices[1]}: {launcher.by} has started "
            f"{launcher.local_size} processes on each of {launcher.num_nodes} machines; leave both keys out"
        )
    check_sp_size(sp_size, devices[0] * devices[1])


def is_sharded(strategy: object) -> bool:
    """Return whether each rank holds only a part of the weights."""
    return isinstance(strategy, Sharded)
