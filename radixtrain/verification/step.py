"""The gradient of an optimizer step as `fit` computes it, against `dedup: false` and the float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.collators.shared_targets import features_once
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.verification.equivalence import verify_arms
from radixtrain.verification.oracle import Features
from radixtrain.verification.report import EquivalenceReport

__all__ = ["verify_step"]

AUTOCAST = {"bf16-mixed": torch.bfloat16}


def verify_step(
    model: nn.Module,
    loss_sum: Callable[[dict[str, Any]], Tensor],
    features: Features,
    collator: StepCollator,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    precision: str = "32-true",
) -> EquivalenceReport:
    """Compare loss and gradients of one optimizer step, with the micro-batches, merged predictions and loss of `fit`.

    The ordinary arm is the step that `dedup: false` would take; the truth is computed from the logits that Hugging
    Face's own model returns for each sequence.

    model: loaded, on its device. It is returned as it was, without gradients. A fresh LoRA, which is zero and would
        leave half of its gradients zero, is filled at random during the comparison.
    loss_sum: micro-batch -> summed loss of `model`, as `RadixModule.loss_sum`.
    features: the sequences of the step; see `SFTData.features_of_step`.
    collator: what cuts and collates them in training.
    attention, kernel: as for `prepare_model`.
    precision: Lightning's name of it; a mixed one adds a comparison under autocast.
    """
    device = next(model.parameters()).device
    if collator.shared_targets == "once":
        features = features_once(features)
    plain, unique = (replace(collator, dedup=dedup, merge_labels=True)(features) for dedup in (False, True))
    with _filled_adapters(model):
        return verify_arms(
            model,
            features,
            lambda: _terms(loss_sum, plain, device),
            lambda: _terms(loss_sum, unique, device),
            attention=attention,
            kernel=kernel,
            autocast=AUTOCAST.get(precision),
        )


@contextmanager
def _filled_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, each LoRA matrix B that is zero, as it starts, is random. The global random state does not change."""
    fresh = [p for name, p in model.named_parameters() if "lora_B" in name and not p.any()]
    draw = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in fresh:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
        yield
    finally:
        with torch.no_grad():
            for parameter in fresh:
                parameter.zero_()


def _terms(loss_sum: Callable[[dict[str, Any]], Tensor], step: Step, device: torch.device) -> Iterator[Tensor]:
    """The terms of the loss of a step, one for each micro-batch."""
    for batch in step.to(device).micro_batches:
        yield loss_sum(batch) / step.num_labels
