"""The two arms of a benchmark: what each computes, and how long it takes, in turns.

`OrdinaryArm` is a Hugging Face model as it is, on padded batches; `RadixArm` is the prepared model, on unique tokens.
Both have the loss of `radixtrain fit` (`radixtrain/hf/predictions.py`), fused with the head if that is one matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.bench.work import MicroBatch, Work
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.prepare import prepare_model, restore_model
from radixtrain.timing import seconds_in_turns

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Arm(ABC):
    """One way to compute a step. plain_head: `has_plain_head(model)`."""

    plain_head: bool

    @abstractmethod
    def prepare(self, model: PreTrainedModel) -> None:
        """Make the model ready for the batches of this arm."""

    @abstractmethod
    def batches(self, work: Work) -> list[MicroBatch]:
        """The micro-batches that make the step together."""

    def loss_terms(self, model: PreTrainedModel, work: Work) -> Iterator[Tensor]:
        """A term for each micro-batch; their sum is the mean cross-entropy over the labelled tokens of the step."""
        for batch in self.batches(work):
            yield forward_rows(model, batch.tensors, self.plain_head).loss_sum() / work.num_labels

    def run_step(self, model: PreTrainedModel, work: Work) -> None:
        """What is timed: every micro-batch forward and, in a `step`, backward."""
        is_step = work.cell.mode == "step"
        with nullcontext() if is_step else torch.no_grad():
            for term in self.loss_terms(model, work):
                if is_step:
                    term.backward()


@dataclass(frozen=True, kw_only=True)
class OrdinaryArm(Arm):
    """Hugging Face's own attention, on padded batches."""

    def __str__(self) -> str:
        return "ordinary"

    def prepare(self, model: PreTrainedModel) -> None:
        restore_model(model)

    def batches(self, work: Work) -> list[MicroBatch]:
        return work.ordinary


@dataclass(frozen=True, kw_only=True)
class RadixArm(Arm):
    """Tree attention on unique tokens. attention, kernel: as for `prepare_model`."""

    attention: str
    kernel: str = "auto"

    def __str__(self) -> str:
        return self.attention

    def prepare(self, model: PreTrainedModel) -> None:
        prepare_model(model, attention=self.attention, kernel=self.kernel)

    def batches(self, work: Work) -> list[MicroBatch]:
        return work.radix_batches(self.attention)


def step_seconds(model: PreTrainedModel, runs: Mapping[K, tuple[Arm, Work]], repeats: int) -> dict[K, list[float]]:
    """Seconds of each run, in turns; every step starts without gradients."""

    def before(name: K) -> None:
        runs[name][0].prepare(model)
        model.zero_grad(set_to_none=True)

    steps = {name: partial(arm.run_step, model, work) for name, (arm, work) in runs.items()}
    return seconds_in_turns(steps, next(model.parameters()).device, repeats, before=before)
