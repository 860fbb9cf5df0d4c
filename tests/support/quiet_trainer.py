"""A trainer of Lightning that writes nothing and shows nothing."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy

__all__ = ["trainer_on"]


def trainer_on(count: int, strategy: Strategy | None = None) -> L.Trainer:
    """For one epoch on the CPU, on as many ranks with a strategy, else on one."""
    several: dict[str, Any] = {"strategy": strategy, "devices": count} if strategy else {"devices": 1}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    return L.Trainer(accelerator="cpu", max_epochs=1, **several, **dict.fromkeys(off, False))
