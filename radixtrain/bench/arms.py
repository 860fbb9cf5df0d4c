"""The two arms of a benchmark on one model: what each computes, and how long it takes, in turns.

Arms are named by their attention strategy; None is the ordinary arm. Both have the same fused loss.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.bench.work import MicroBatch, Work
from radixtrain.hf.prepare import backbone_of, prepare_model, restore_model
from radixtrain.loss import linear_cross_entropy

__all__ = ["hidden_states", "loss_terms", "run_step", "seconds_in_turns", "set_arm"]

TARGET_KEYS = ("shift_labels", "radix_prediction_rows", "radix_loss_weights")
ORDINARY_KEYS = ("input_ids", "attention_mask", "position_ids")
K = TypeVar("K")


def set_arm(model: PreTrainedModel, arm: str | None, kernel: str) -> None:
    """Make the model ready for the batches of an arm."""
    if arm is None:
        restore_model(model)
    else:
        prepare_model(model, attention=arm, kernel=kernel)


def loss_terms(model: PreTrainedModel, work: Work, arm: str | None) -> Iterator[Tensor]:
    """A term for each micro-batch; their sum is the mean cross-entropy over the labelled tokens of the step."""
    prefix = "" if arm is None else "radix_"
    head = model.get_output_embeddings().weight
    for batch in work.batches(arm):
        hidden = _predicting_rows(model, batch, arm)
        rows, weights = (batch.tensors[f"{prefix}{name}"] for name in ("prediction_rows", "loss_weights"))
        yield linear_cross_entropy(hidden, head, batch.tensors["shift_labels"][0], rows, weights) / work.num_labels


def run_step(model: PreTrainedModel, work: Work, arm: str | None) -> None:
    """What is timed: every micro-batch forward and, in a `step`, backward."""
    is_step = work.cell.mode == "step"
    with nullcontext() if is_step else torch.no_grad():
        for term in loss_terms(model, work, arm):
            if is_step:
                term.backward()


def hidden_states(model: PreTrainedModel, work: Work, arm: str | None) -> Tensor:
    """(T, D), the last hidden state of every original token, sequence by sequence."""
    of_sequence: dict[int, Tensor] = {}
    for batch in work.batches(arm):
        lengths = [work.lengths[index] for index in batch.members]
        if arm is None:
            padded = _ordinary_hidden(model, batch)
            states = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        else:
            unique = _radix_hidden(model, batch, (*TARGET_KEYS, "radix_predictor_indices"))
            states = list(unique[batch.tensors["radix_inverse_indices"]].split(lengths))
        of_sequence.update(zip(batch.members, states, strict=True))
    return torch.cat([of_sequence[index] for index in range(len(work.lengths))])


def seconds_in_turns(
    model: PreTrainedModel, runs: Mapping[K, tuple[Work, str | None]], kernel: str, repeats: int
) -> dict[K, list[float]]:
    """Seconds of each run (work and arm), A B A B ...; every step finds the parameters without gradients."""
    device = next(model.parameters()).device
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (work, arm) in runs.items():
            set_arm(model, arm, kernel)
            model.zero_grad(set_to_none=True)
            _wait_for(device)
            start = time.perf_counter()
            run_step(model, work, arm)
            _wait_for(device)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _predicting_rows(model: PreTrainedModel, batch: MicroBatch, arm: str | None) -> Tensor:
    """(R, D)."""
    if arm is not None:
        return _radix_hidden(model, batch, TARGET_KEYS)
    return _ordinary_hidden(model, batch).flatten(0, 1).index_select(0, batch.tensors["predictor_indices"])


def _ordinary_hidden(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """(rows, longest, D)."""
    inputs: dict[str, Any] = {name: batch.tensors[name] for name in ORDINARY_KEYS}
    return backbone_of(model)(**inputs, use_cache=False).last_hidden_state


def _radix_hidden(model: PreTrainedModel, batch: MicroBatch, left_out: tuple[str, ...]) -> Tensor:
    """(R, D) of the rows that predict; (U, D) of all where the predictors are left out."""
    inputs = {name: value for name, value in batch.tensors.items() if name not in left_out}
    return backbone_of(model)(**inputs).last_hidden_state[0]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
