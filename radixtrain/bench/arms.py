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
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.head import hidden_rows
from radixtrain.hf.predictions import TARGET_KEYS, predict
from radixtrain.hf.prepare import prepare_model, restore_model
from radixtrain.timing import seconds_in_turns
from radixtrain.tree.layout import INVERSE_INDICES, PREDICTOR_INDICES

__all__ = ["Arm", "OrdinaryArm", "RadixArm", "step_seconds"]

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
            yield predict(model, batch.tensors, self.plain_head).loss_sum() / work.num_labels

    def run_step(self, model: PreTrainedModel, work: Work) -> None:
        """What is timed: every micro-batch forward and, in a `step`, backward."""
        is_step = work.cell.mode == "step"
        with nullcontext() if is_step else torch.no_grad():
            for term in self.loss_terms(model, work):
                if is_step:
                    term.backward()

    def hidden_states(self, model: PreTrainedModel, work: Work) -> Tensor:
        """(T, D), the last hidden state of every original token, sequence by sequence."""
        of_sequence: dict[int, Tensor] = {}
        for batch in self.batches(work):
            lengths = [work.lengths[index] for index in batch.members]
            states = self._token_states(model, batch, lengths).split(lengths)
            of_sequence.update(zip(batch.members, states, strict=True))
        return torch.cat([of_sequence[index] for index in range(len(work.lengths))])

    @abstractmethod
    def _token_states(self, model: PreTrainedModel, batch: MicroBatch, lengths: list[int]) -> Tensor:
        """(T, D) of the sequences of a micro-batch, which have these lengths, back to back."""


@dataclass(frozen=True, kw_only=True)
class OrdinaryArm(Arm):
    """Hugging Face's own attention, on padded batches."""

    def __str__(self) -> str:
        return "ordinary"

    def prepare(self, model: PreTrainedModel) -> None:
        restore_model(model)

    def batches(self, work: Work) -> list[MicroBatch]:
        return work.ordinary

    def _token_states(self, model: PreTrainedModel, batch: MicroBatch, lengths: list[int]) -> Tensor:
        """Every token is selected as if it predicted; the padding on the right is not."""
        places = torch.arange(batch.tensors["input_ids"].shape[1])
        tokens = (places < torch.tensor(lengths)[:, None]).flatten().nonzero().squeeze(1)
        return hidden_rows(parts_of(model), {**batch.tensors, PREDICTOR_INDICES: tokens.to(model.device)})


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

    def _token_states(self, model: PreTrainedModel, batch: MicroBatch, lengths: list[int]) -> Tensor:
        """The model returns every row if the batch names no predictors."""
        left_out = (*TARGET_KEYS, PREDICTOR_INDICES)
        inputs = {name: value for name, value in batch.tensors.items() if name not in left_out}
        return hidden_rows(parts_of(model), inputs)[batch.tensors[INVERSE_INDICES]]


def step_seconds(model: PreTrainedModel, runs: Mapping[K, tuple[Arm, Work]], repeats: int) -> dict[K, list[float]]:
    """Seconds of each run, in turns; every step starts without gradients."""

    def before(name: K) -> None:
        runs[name][0].prepare(model)
        model.zero_grad(set_to_none=True)

    steps = {name: partial(arm.run_step, model, work) for name, (arm, work) in runs.items()}
    return seconds_in_turns(steps, next(model.parameters()).device, repeats, before=before)
