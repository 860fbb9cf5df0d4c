"""One measured step: its sequences, cut into micro-batches for both arms; their arithmetic; and their seconds.

The ordinary arm is the best that a user has: sequences sorted by length and padded on the right, and the head only on
tokens that predict. `sdpa` does not receive the padding mask: causal attention never looks to the right, and without a
mask it has its fastest kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from radixtrain.bench.cells import Cell, GivenBatch, features_of_cell
from radixtrain.bench.flops import ordinary_flops, unique_flops
from radixtrain.collators.features import packed, token_rows
from radixtrain.collators.steps import PaddedCollator, Step, StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.errors import UserError
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.prepare import prepare_model, restore_model
from radixtrain.timing import peak_bytes, seconds_in_turns
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.radix_inputs import radix_of

K = TypeVar("K")


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """One step, in both arms.

    cell: its name.
    features: the sequences, as a collator takes them.
    ordinary, radix: the step of either arm.
    plans: of each micro-batch of `radix`.
    """

    cell: Cell | GivenBatch
    features: Sequence[Mapping[str, Any]]
    ordinary: Step
    radix: Step
    plans: list[PrefixPlan]

    def to(self, device: torch.device) -> Work:
        return replace(self, ordinary=self.ordinary.to(device), radix=self.radix.to(device))

    def step(self, attention: str | None) -> Step:
        """Return the step of the ordinary arm (None) or a strategy."""
        return self.ordinary if attention is None else self.radix

    @property
    def lengths(self) -> list[int]:
        """Count the tokens of each sequence."""
        return [len(feature["input_ids"]) for feature in self.features]

    @property
    def num_labels(self) -> int:
        """Count the labelled tokens, the divisor of the loss."""
        return self.radix.num_labels

    @property
    def least_unique_tokens(self) -> int | None:
        """Return U as if the step were not cut; None if it is one micro-batch."""
        return self.radix.num_unique_tokens if len(self.radix.micro_batches) > 1 else None

    @property
    def num_tokens(self) -> int:
        """Return T, without padding."""
        return self.radix.num_tokens

    @property
    def num_unique_tokens(self) -> int:
        """Return the U that a radix arm computes; a prefix in two micro-batches counts twice."""
        return self.radix.num_computed_tokens

    def ideal_speedup(self, config: PreTrainedConfig) -> float:
        """Return the floating-point operations of the ordinary arm, without padding, over those of the radix arm."""
        predictors = [len(radix_of(batch).predictor_indices) for batch in self.radix.micro_batches]
        unique = (unique_flops(config, *each).total for each in zip(self.plans, predictors, strict=True))
        return self._ordinary_flops(config) / sum(unique)

    def ordinary_teraflops(self, config: PreTrainedConfig) -> float:
        """Return the teraflops (1e12 operations) of the ordinary arm's forward pass, or three times that for a step."""
        return self._ordinary_flops(config) * (3 if self.cell.mode == "step" else 1) / 1e12

    def _ordinary_flops(self, config: PreTrainedConfig) -> float:
        """Count a forward pass. A sequence costs the same in any micro-batch, so the radix ones are counted."""
        labels = [int(radix_of(batch).loss_weights.sum()) for batch in self.radix.micro_batches]
        return sum(ordinary_flops(config, *each).total for each in zip(self.plans, labels, strict=True))


def make_work(cell: Cell) -> Work:
    """Collate a cell, on the host: one micro-batch in each arm, without padding."""
    return work_of(cell, features_of_cell(cell))


def work_of(
    cell: Cell | GivenBatch,
    features: Sequence[Mapping[str, Any]],
    batch_size: int | None = None,
    max_tokens: int | None = None,
    **options: Any,
) -> Work:
    """Collate given sequences, on the host.

    features: as a `RadixCollator` takes them.
    batch_size: sequences of an ordinary micro-batch; None for a single micro-batch.
    max_tokens: most unique tokens of a radix micro-batch; None for a single micro-batch.
    options: of the `StepCollator`.

    Raises UserError if no token bears loss.
    """
    step = StepCollator(max_tokens=max_tokens, **options)(features)
    if not step.num_labels:
        raise UserError(f"{cell}: no token bears loss, so there is no step to measure")
    arrays = token_rows(features)
    plans = [_plan([arrays[index] for index in members]) for members in step.members]
    return Work(cell=cell, features=features, ordinary=_padded(arrays, batch_size), radix=step, plans=plans)


def with_ordinary_batch_size(work: Work, batch_size: int | None, keep_mask: bool = False) -> Work:
    """Cut the ordinary arm of the work again, on the host.

    batch_size: as for `work_of`.
    keep_mask: give attention the padding mask, for kernels that skip what it hides.
    """
    return replace(work, ordinary=_padded(token_rows(work.features), batch_size, keep_mask))


def _plan(arrays: Sequence[TokenRow]) -> PrefixPlan:
    together = packed(arrays)
    return build_prefix_plan(together.input_ids, together.cu_seqlens, together.position_ids)


def _padded(arrays: Sequence[TokenRow], batch_size: int | None, keep_mask: bool = False) -> Step:
    """Make padded batches of that many sequences, the longest first."""
    order = sorted(range(len(arrays)), key=lambda index: -len(arrays[index].input_ids))
    size = batch_size or len(order)
    members = [order[start : start + size] for start in range(0, len(order), size)]
    batches = [PaddedCollator().collate([arrays[index] for index in group]) for group in members]
    for batch in () if keep_mask else batches:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return Step(
        micro_batches=batches,
        members=members,
        num_labels=sum(len(radix_of(batch).predictor_indices) for batch in batches),
        num_tokens=sum(len(feature.input_ids) for feature in arrays),
        num_computed_tokens=sum(batch["input_ids"].numel() for batch in batches),
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to compute a step, with the loss of `radixtrain fit`, fused with the head if that is one matrix.

    attention: of the prepared model on unique tokens, as for `prepare_model`; None for Hugging Face's unchanged model
        on padded batches. kernel, allow_dropout: as for `prepare_model`. plain_head: `has_plain_head(model)`.
    """

    plain_head: bool
    attention: str | None = None
    kernel: str = "auto"
    allow_dropout: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.attention or "ordinary"

    def prepare(self, model: PreTrainedModel) -> None:
        """Make the model ready for the batches of this arm."""
        if self.attention is None:
            restore_model(model)
        else:
            prepare_model(model, attention=self.attention, kernel=self.kernel, allow_dropout=self.allow_dropout)

    def loss_terms(self, model: PreTrainedModel, work: Work) -> Iterator[Tensor]:
        """Yield a term per micro-batch; their sum is the mean cross-entropy over the labelled tokens of the step."""
        for batch in work.step(self.attention).micro_batches:
            yield self.loss_sum(model, batch) / work.num_labels

    def loss_sum(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
        """Sum the cross-entropies of a micro-batch."""
        return forward_rows(model, batch, self.plain_head).loss_sum()

    def run_step(self, model: PreTrainedModel, work: Work) -> None:
        """Run what is timed: every micro-batch forward and, in a `step`, backward."""
        is_step = work.cell.mode == "step"
        with nullcontext() if is_step else torch.no_grad():
            for term in self.loss_terms(model, work):
                if is_step:
                    term.backward()

    def peak(self, model: PreTrainedModel, work: Work) -> int:
        """Return the `added_bytes` of this arm's step."""
        self.prepare(model)
        return added_bytes(model, partial(self.run_step, model, work), trains=work.cell.mode == "step")


def added_bytes(model: PreTrainedModel, run: Callable[[], object], trains: bool = True) -> int:
    """Return the peak bytes that a step adds to weights, batch and, if it trains, gradients.

    The gradients exist already, as in the second micro-batch of an optimizer step. So this counts activations, the loss
    with its gradient of the head, and the one gradient at a time that autograd is about to add.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if trains and parameter.requires_grad else None
    return peak_bytes(run, next(model.parameters()).device)


def step_seconds(model: PreTrainedModel, runs: Mapping[K, tuple[Arm, Work]], repeats: int) -> dict[K, list[float]]:
    """Time the runs, alternating; every step starts without gradients."""

    def before(name: K) -> None:
        runs[name][0].prepare(model)
        model.zero_grad(set_to_none=True)

    steps = {name: partial(arm.run_step, model, work) for name, (arm, work) in runs.items()}
    return seconds_in_turns(steps, next(model.parameters()).device, repeats, before=before)
