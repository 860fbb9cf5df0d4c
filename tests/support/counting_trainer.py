"""A trainer whose steps only count, around `SaveCheckpoints`: fast enough to try every order of steps and requests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from forged_checkpoints import a_run

from radixtrain.checkpoints.folder import Checkpoint, write_checkpoint
from radixtrain.distributed import ranks
from radixtrain.errors import Stopped
from radixtrain.training.fault_tolerance.run_state import Position
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests

__all__ = ["CountingTrainer", "written"]


class CountingTrainer:
    """What `SaveCheckpoints` uses of `Loop` and of `RadixModule`, and real requests. options: of `SaveCheckpoints`."""

    def __init__(self, folder: Path, **options: Any):
        self.requests = Requests()
        self.saver = SaveCheckpoints(folder / "checkpoints", self.requests, **options)
        self.module: Any = torch.nn.Linear(2, 2)
        self.module.position, self.module.is_stepping = Position(0, 0), False
        self.validating = False

    def save_checkpoint(self, path: Path) -> None:
        position = self.module.position
        checkpoint = Checkpoint({}, {}, a_run(position.num_steps, position=asdict(position)))
        ranks().broadcast_from_rank0(lambda: write_checkpoint(path, checkpoint))

    def start(self) -> CountingTrainer:
        self.saver.started(self.module)
        return self

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.saver.between_steps(self, self.module)
            done = self.module.position.num_batches + 1
            self.module.position = Position(done, done)

    def validate(self) -> None:
        self.validating = True
        self.saver.in_validation(self, self.module)
        self.validating = False

    def fail(self, error: BaseException) -> None:
        self.saver.failed(self, self.module, error)

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
