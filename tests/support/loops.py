"""A loop of `fit` that shows nothing, and writes into a temporary folder."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from radixtrain.settings.sections import TrainerSettings
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from radixtrain.training.devices.fabric import Sharded
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from radixtrain.training.loop import Loop
from radixtrain.training.results.record import Record

__all__ = ["loop_on"]


def loop_on(count: int = 1, strategy: str = "ddp", **settings: Any) -> Loop:
    """On the CPU; on as many ranks, which have met. settings: of `trainer`."""
    kind = Sharded if strategy == "fsdp2" else DDPStrategy
    several: dict[str, Any] = {"strategy": kind(timeout=timedelta(minutes=5)), "devices": count} if count > 1 else {}
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **several})
    folder = Path(mkdtemp())
    record = Record(folder, SaveCheckpoints(folder / "checkpoints", Requests(), is_enabled=False))
    given = TrainerSettings(**{"enable_progress_bar": False, **settings})
    return Loop(fabric, given, folder, [], EvaluateGeneration(), {}, record=record)
