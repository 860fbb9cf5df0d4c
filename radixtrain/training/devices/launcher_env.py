"""Finds in the environment which launcher started this process, its rank and the number of ranks."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixtrain.errors import EndedElsewhere, UserError

if TYPE_CHECKING:
    from radixtrain.settings.sections import TrainerSettings

logger = logging.getLogger(__name__)

PARENT = "RADIXTRAIN_PARENT"  # variable of a rank that `fit` has started itself: the id of the process that did
ON_SEVERAL = ("fit", "validate", "test", "predict")  # commands that run on several devices
COPIES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")  # of launchers whose copies no process group connects
INTERACTIVE = ("bash", "interactive")  # job names that `srun --pty` and `salloc` give: their tasks are not ranks


@dataclass(frozen=True)
class LauncherEnv:
    """The launcher of this process. by: torchrun or srun; empty for a process that is not one of several.

    rank, size: of this process among all of them. local_rank, local_size: among those of this machine.
    """

    by: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_silent(self) -> bool:
        """Return whether another process of this machine reports the mistakes that each finds on its own."""
        return self.local_rank > 0

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size


def launcher_env() -> LauncherEnv:
    """Find the launcher: `srun`, or torchrun or what sets its variables: `accelerate launch`, `fit` for its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return LauncherEnv("torchrun", *(int(os.environ[name]) for name in names))
    num_tasks = os.environ.get("SLURM_NTASKS", "")
    is_task = "SLURM_PROCID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    if num_tasks.isdigit() and int(num_tasks) > 1 and is_task:
        rank, local_rank = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
        return LauncherEnv("srun", rank, int(num_tasks), local_rank, _tasks_per_node(num_tasks))
    return LauncherEnv()


def is_launched() -> bool:
    """Return whether this process is one of several that a launcher has started."""
    return bool(launcher_env().by)


def default_devices() -> dict[str, int]:
    """Return keys of `trainer` with defaults: one device, or as many as torchrun or srun have started processes."""
    launcher = launcher_env()
    return {"trainer.devices": launcher.local_size} if is_launched() else {}


def one_device(config: TrainerSettings, command: str) -> dict[str, Any]:
    """Return the keys of `trainer` for a command that runs on one device: the first of those that are set for `fit`."""
    named = config.devices if isinstance(config.devices, list) else []
    if len(named) > 1 or config.devices not in (named, 1, "auto"):
        logger.info("%s runs on one device: trainer.devices and trainer.strategy are for fit", command)
    return {"devices": named[:1] or 1, "num_nodes": 1, "strategy": "auto"}


def check_started(command: str) -> None:
    """Raise UserError if this is one of several copies that would all do the same, and write the same files.

    Of ranks of a command that runs on one device, only the first of each machine reports; others raise EndedElsewhere.
    """
    found = launcher_env()
    for name in () if found.by else COPIES:
        if (count := os.environ.get(name, "")).isdecimal() and int(count) > 1:
            raise UserError(
                f"{name}={count}: a launcher started {count} copies of this command that do not know one another; "
                f"start it with torchrun or srun, or set trainer.devices"
            )
    if found.size == 1 or command in ON_SEVERAL:
        return
    if found.is_silent:
        raise EndedElsewhere
    raise UserError(f"{found.by} started {found.size} copies of `{command}`, which runs on one device: start one")


def _tasks_per_node(num_tasks: str) -> int:
    """Parse 4 from `4(x2)`, two nodes of four tasks. Raises UserError if nodes do not have the same number."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name, text = next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("SLURM_NTASKS", num_tasks))
    found = re.fullmatch(r"(\d+)(?:\(x\d+\))?", text)
    if found is None:
        raise UserError(f"{name}={text}: each machine needs the same number of tasks; set --ntasks-per-node")
    return int(found[1])
