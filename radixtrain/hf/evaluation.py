"""Evaluation in Hugging Face's `Trainer`: the loss of a radix batch is right, its logits are not those of examples.

A radix batch gives one list of predictions for all its examples, `[1, P, V]`, in the order of the tree.
`compute_metrics` and `Trainer.predict` take the first axis for examples, so that 16 of them would be measured as one.
The collator does not know what its batches are for, and the `Trainer` takes `labels` from the batch before it calls the
model, so neither can return logits by example. But the `Trainer` calls the model, so this check, which runs inside the
call, reads the stack.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

from radixtrain.errors import UserError

__all__ = ["check_evaluation"]

MAX_FRAMES = 64  # TRL with adapters has 17 between the hook and the trainer


def check_evaluation(model: nn.Module) -> None:
    """Refuse a radix batch whose logits a Hugging Face `Trainer` will use: `compute_metrics`, `predict`.

    model: the backbone that received the batch. In training mode the stack is not read; in evaluation mode the check
        takes 3 us under a `Trainer`, 7 us at most.

    Raises UserError inside `Trainer.prediction_step`, also in a subclass, unless it wants only the loss.
    """
    trainer = None if model.training else _trainer_that_uses_the_logits(sys._getframe(1))
    if trainer is not None:
        raise UserError(
            f"{trainer} uses the logits of this evaluation (compute_metrics, predict) as one row per example, but a "
            f"batch of RadixCollator has one list of predictions for all its examples, in the order of the tree, so "
            f"the metrics would be wrong. Evaluate on ordinary batches, which a prepared model computes as before: "
            f"with a subclass of {trainer} that sets self.data_collator to DataCollatorForSeq2Seq(tokenizer) while it "
            f"makes the evaluation's DataLoader (recipes/hf_trainer_metrics.py), or after training with "
            f"Trainer(model=model, args=args, data_collator=DataCollatorForSeq2Seq(tokenizer), compute_metrics=...)"
            f".evaluate(rows). For the loss only, leave out compute_metrics, or set prediction_loss_only=True in the "
            f"training arguments"
        )


def _trainer_that_uses_the_logits(frame: FrameType | None) -> str | None:
    """The class of the `Trainer` that called the model for its logits, None if there is none.

    The innermost `prediction_step` decides: an override may ask its parent class for something else.
    """
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "prediction_step":
            names = frame.f_locals
            if "prediction_loss_only" in names and _is_trainer(names.get("self")):
                return None if names["prediction_loss_only"] else type(names["self"]).__name__
        frame = frame.f_back
    return None


def _is_trainer(candidate: Any) -> bool:
    """By name: importing `transformers.trainer` needs accelerate, which a user without a `Trainer` may not have."""
    return any(
        (kind.__module__, kind.__name__) == ("transformers.trainer", "Trainer") for kind in type(candidate).__mro__
    )
