"""Weighted log-likelihoods and clipped policy ratios in float64: a padded loop of Hugging Face, and radixtrain.

The ordinary arm is written from the definitions: it reads the features and nothing of radixtrain's collators or losses.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain import restore_model, share_prefixes
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.loss import clipped_policy_loss
from radixtrain.verification.oracle import float64_throughout, gradients_of

__all__ = ["BAR", "FLOATS", "Features", "clipped_ratio", "log_likelihood", "worst_error"]

BAR = 1e-12  # of a gradient's norm; the worst of 150 generated steps was 2.4e-14
N = -100
EPSILON, EPSILON_HIGH = 0.2, 0.3
FLOATS = ("loss_weights", "old_logprobs", "advantages")
Features = list[dict[str, Any]]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # log-probabilities, weights, old ones, advantages -> a sum


def log_likelihood(logprobs: Tensor, weights: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return (weights * logprobs).sum()


def clipped_ratio(logprobs: Tensor, weights: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON_HIGH)
    return (weights * torch.where(ratio * advantages < bounded * advantages, ratio, bounded) * advantages).sum()


def ordinary(model: Any, features: Features, loss: Loss) -> Iterator[Tensor]:
    """Minus the loss of one right-padded batch, divided by the number of labelled tokens."""
    counted = [{**f, "position_ids": f.get("position_ids", list(range(len(f["input_ids"]))))} for f in features]
    longest = max(len(feature["input_ids"]) for feature in features)

    def padded(name: str, fill: float = 0) -> Tensor:
        """(B, L). Fill also stands for an entry that is not there."""
        rows = [np.asarray(f.get(name, np.full(len(f["input_ids"]), fill))) for f in counted]
        return torch.tensor(np.stack([np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows]))

    lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
    seen = (torch.arange(longest) < lengths[:, None]).long()
    logits = model(
        padded("input_ids"), attention_mask=seen, position_ids=padded("position_ids"), use_cache=False
    ).logits
    labels = padded("labels", N)[:, 1:]
    bears_loss = labels != N
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][bears_loss]
    weights, old, advantages = (padded(name)[:, 1:][bears_loss].double() for name in FLOATS)
    yield -loss(logprobs, weights, old, advantages) / len(labels[bears_loss])


def shared(model: Any, step: Step, is_policy: bool) -> Iterator[Tensor]:
    """The same loss of a prepared model, a term for each micro-batch."""
    for batch in step.micro_batches:
        predictions = forward_rows(model, batch, plain_head=True)
        if is_policy:
            numbers = (getattr(batch["radix"], name) for name in ("advantages", "loss_weights", "old_logprobs"))
            yield clipped_policy_loss(predictions.logprobs(), *numbers, EPSILON, EPSILON_HIGH) / step.num_labels
        else:
            yield predictions.loss_sum() / step.num_labels


def worst_error(model: Any, features: Features, loss: Loss, rows: Features | None = None, **options: Any) -> float:
    """The largest relative error of a gradient; of one below a thousandth of the largest, relative to that.

    rows: of the ordinary arm, if not the same.
    """
    step = StepCollator(**options)(features)
    with float64_throughout(model):
        expected = gradients_of(model, lambda: ordinary(model, features if rows is None else rows, loss)).tensors
        share_prefixes(model)
        try:
            found = gradients_of(model, lambda: shared(model, step, loss is clipped_ratio)).tensors
        finally:
            restore_model(model)
    floor = max(float(tensor.norm()) for tensor in expected.values()) / 1000
    return max(float((found[n] - x).norm()) / max(float(x.norm()), floor, 1e-300) for n, x in expected.items())
