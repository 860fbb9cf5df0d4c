"""What `fit` computes for an optimizer step, against `dedup: false` and the float64 truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radixtrain.equivalence import verify_arms
from radixtrain.equivalence_report import EquivalenceReport
from radixtrain.oracle import Features

if TYPE_CHECKING:
    from radixtrain.collators.steps import StepCollator
    from radixtrain.training.module import RadixModule

__all__ = ["verify_step"]

AUTOCAST = {"bf16-mixed": torch.bfloat16}


def verify_step(
    module: RadixModule, features: Features, collator: StepCollator, precision: str = "32-true"
) -> EquivalenceReport:
    """Loss and gradients of one optimizer step: micro-batches, merged predictions, fused loss and all.

    The ordinary arm is the step that `dedup: false` would take; the truth is Hugging Face's own model and logits.

    module: configured, on its device. Comes back as it was, without gradients.
    features: the sequences of the step; see `SFTData.features_of_step`.
    collator: what cuts and collates them in training.
    precision: Lightning's name; a mixed one adds a rung under autocast.
    """
    assert module.model is not None
    plain, unique = (replace(collator, dedup=dedup, merge_labels=True)(features) for dedup in (False, True))
    return verify_arms(
        module.model, features, lambda: _terms(module, plain), lambda: _terms(module, unique),
        attention=module.hparams.attention, kernel=module.hparams.kernel, autocast=AUTOCAST.get(precision),
    )  # fmt: skip


def _terms(module: RadixModule, step: dict[str, Any]) -> Iterator[Tensor]:
    """The loss of a step, a micro-batch at a time."""
    for batch in step["micro_batches"]:
        moved = {name: x.to(module.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        yield module.loss_sum(moved) / step["num_labels"]
