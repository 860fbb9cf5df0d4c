"""The tasks of a SLURM step as ranks, for Lightning."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.environments import ClusterEnvironment

from radixtrain.training.devices.started import Started

__all__ = ["SlurmTasks"]

FIRST_PORT = 15_000


class SlurmTasks(ClusterEnvironment):
    """What Lightning needs to know of the tasks that `srun` has started.

    Its own `SLURMEnvironment` also saves and requeues at signals, as `Requests` does here, takes any fresh run for one
    that goes on, and refuses `--ntasks` without `--ntasks-per-node`.

    found: this task. The host of rank 0 is the first one of the step, unless MASTER_ADDR and MASTER_PORT name a place.
    """

    def __init__(self, found: Started):
        super().__init__()
        self.found = found
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1")
        self._address = os.environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes)
        port = FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % 10_000
        self._port = int(os.environ.get("MASTER_PORT", port))
        self._node = int(os.environ.get("SLURM_NODEID", "0"))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._address

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        """False: `device_settings` gives it to the trainer."""
        return False

    def world_size(self) -> int:
        return self.found.size

    def set_world_size(self, size: int) -> None:
        """SLURM has set it."""

    def global_rank(self) -> int:
        return self.found.rank

    def set_global_rank(self, rank: int) -> None:
        """SLURM has set it."""

    def local_rank(self) -> int:
        return self.found.local_rank

    def node_rank(self) -> int:
        return self._node
