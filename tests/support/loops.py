"""A loop of `fit` that writes nothing and shows nothing.

A trainer whose steps only count, around `SaveCheckpoints`: fast enough to try every order of steps and requests.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from radixtrain.checkpoints.folder import write_checkpoint
from radixtrain.distributed import ranks
from radixtrain.errors import Stopped
from radixtrain.settings.trainer import TrainerSettings
from radixtrain.training.devices.fabric import Sharded
from radixtrain.training.fault_tolerance.resume import Position
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from radixtrain.training.loop import Loop


def loop_on(count: int = 1, strategy: str = "ddp", parts: tuple[Any, ...] = (), **settings: Any) -> Loop:
    """On the CPU; on as many ranks, which have met. settings: of `trainer`."""
    kind = Sharded if strategy == "fsdp2" else DDPStrategy
    several: dict[str, Any] = {"strategy": kind(timeout=timedelta(minutes=5)), "devices": count} if count > 1 else {}
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **several})
    return Loop(fabric, TrainerSettings(**settings), Path("nowhere"), [], parts)


class CountingTrainer:
    """What `SaveCheckpoints` uses of `Loop` and of `RadixModule`, and real requests. options: of `SaveCheckpoints`."""

    def __init__(self, folder: Path, **options: Any):
        self.requests = Requests(folder)
        self.saver = SaveCheckpoints(folder / "checkpoints", self.requests, **options)
        self.module: Any = torch.nn.Linear(2, 2)
        self.module.position, self.module.is_stepping = Position(0, 0), False
        self.state = SimpleNamespace(fn="fit")
        self.sanity_checking = self.validating = False
        self.ckpt_path = ""

    def save_checkpoint(self, path: Path) -> None:
        position = self.module.position
        state = {"global_step": position.num_steps, "state_dict": {}, "position": asdict(position)}
        ranks().broadcast_from_rank0(lambda: write_checkpoint(path, state))

    def start(self) -> CountingTrainer:
        self.saver.on_train_start(self, self.module)
        return self

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.saver.on_train_batch_start(self, self.module)
            done = self.module.position.num_batches + 1
            self.module.position = Position(done, done)

    def validate(self) -> None:
        self.validating = True
        self.saver.on_validation_batch_end(self, self.module)
        self.validating = False

    def fail(self, error: BaseException) -> None:
        self.saver.on_exception(self, self.module, error)

    def run(self, before: Any) -> tuple[str, int]:
        """Three steps, then `before`, then three more: how it is stopped."""
        try:
            with self.requests, self.requests.deferred():
                self.start().steps(3)
                before()
                self.steps(3)
        except Stopped as stopped:
            return str(stopped), stopped.code
        return "done", 0


def written(folder: Path) -> list[str]:
    """The names of the checkpoints of a run."""
    places = [*folder.glob("checkpoints/*")]
    return sorted(path.name for path in places if not path.is_symlink())
