"""The position of a run between two optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixtrain.errors import UserError


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps.

    num_batches: DataLoader items that were trained on, over all epochs.
    num_steps: optimizer steps among them; a step that was skipped is an item without one.
    validation_pending: whether a validation was due here and has not been finished.
    """

    num_batches: int
    num_steps: int
    validation_pending: bool = False

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_batches) < 0:
            raise UserError(f"ckpt_path: {self.num_steps} steps after {self.num_batches} batches, as no run has taken")


def check_not_beyond(trainer: Any, position: Position, epoch_length: int) -> None:
    """Raise UserError if more steps or epochs were taken than this run has."""
    epochs = -(-position.num_batches // epoch_length)
    for name, taken, limit in (
        ("max_steps", position.num_steps, trainer.max_steps),
        ("max_epochs", epochs, trainer.max_epochs),
    ):
        if limit not in (None, -1) and taken > limit:
            what = name.removeprefix("max_")
            raise UserError(
                f"ckpt_path: {taken:,} {what} were begun, and trainer.{name} is {limit:,}; raise it to continue"
            )
