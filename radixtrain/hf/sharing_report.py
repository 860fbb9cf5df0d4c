"""Counts what was shared, for `sharing_report`, and warns once of what makes a training slow or bad.

A model that trains without sharing anything is slow, which is not an error. Only shapes are read, so the device is not
waited for. A call takes 0.1 us once a batch has shared something.

An optimizer that changes weights of 16 bits rounds small updates away. A model does not know its optimizer, and its own
weights do not tell: under DeepSpeed and FSDP's mixed precision they have 16 bits, and the optimizer changes float32
copies. So the weights of the optimizer itself are looked at.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from radixtrain.versions import untested


@dataclass
class SharingReport:
    """Totals over all calls of a model since `share_prefixes`.

    num_shared: calls that shared tokens.
    not_shared: calls that did not, counted by reason. Those that ran as if nothing had been installed count nowhere
        else; a batch of a `RadixCollator` counts in T and U too, so that r covers all its batches.
    num_generating: calls of `generate`, whose cache shares already.
    num_places: sum of B x L, which an ordinary model computes.
    num_tokens: sum of T, without padding.
    num_unique_tokens: sum of U, which were computed; with what a collator pads them to.
    num_images, num_distinct_images: of the shared calls; the tower computed the distinct ones of each call.
    why_every_image: why a call's tower computed copies too; None if none did.
    num_head_places, num_head_rows: rows requested of the head, and computed by it, in its calls that shared.
    plan_seconds: spent on reading ids and building plans, even if nothing was shared.
    unshared_models: other models of the trainer, by the names of its attributes, that compute every copy.
    """

    num_shared: int = 0
    not_shared: Counter[str] = field(default_factory=Counter)
    num_generating: int = 0
    num_places: int = 0
    num_tokens: int = 0
    num_unique_tokens: int = 0
    num_images: int = 0
    num_distinct_images: int = 0
    why_every_image: str | None = None
    num_head_places: int = 0
    num_head_rows: int = 0
    plan_seconds: float = 0.0
    unshared_models: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharingReport:
        """Return a new report: the copy of a model counts its own calls."""
        return SharingReport()

    def count_unshared(self, reason: str) -> None:
        """Add a call that ran as if nothing had been installed."""
        if reason == GENERATION:
            self.num_generating += 1
        else:
            self.not_shared[reason] += 1

    def count_tokens(self, num_places: int, num_tokens: int, num_unique_tokens: int) -> None:
        """Add B x L, T and U of a call that ran on unique tokens."""
        self.num_places += num_places
        self.num_tokens += num_tokens
        self.num_unique_tokens += num_unique_tokens

    def count_head(self, num_places: int, num_rows: int) -> None:
        """Add a shared call of the head: how many rows were requested, and how many it computed."""
        self.num_head_places += num_places
        self.num_head_rows += num_rows

    @property
    def compression_ratio(self) -> float:
        """Return r = T / U; 1.0 if nothing was shared."""
        return self.num_tokens / self.num_unique_tokens if self.num_unique_tokens else 1.0

    def __str__(self) -> str:
        took = f"; plans took {self.plan_seconds:.2f} s" if self.plan_seconds else ""  # not in a collator
        lines = [
            f"{self.num_shared} calls shared: {self.num_places:,} places, {self.num_tokens:,} tokens, "
            f"{self.num_unique_tokens:,} unique, r = {self.compression_ratio:.2f}{took}"
        ]
        if self.num_images:
            why = self.why_every_image and f", copies too: {self.why_every_image}"
            lines.append(f"the tower computed {self.num_distinct_images:,} of {self.num_images:,} images{why or ''}")
        if self.num_head_places:
            lines.append(f"the head computed {self.num_head_rows:,} rows for {self.num_head_places:,} places")
        if not self.num_shared + self.num_generating and not self.not_shared:
            lines.append("the backbone was never called: hooks do not run if something calls its forward method")
        lines += [f"{name} shares nothing: share_prefixes(trainer.{name})" for name in self.unshared_models]
        lines += [f"{count} calls not shared: {reason}" for reason, count in self.not_shared.most_common()]
        lines += [untested().strip()] if self.not_shared and untested() else []
        lines += [f"{self.num_generating} calls of generation"] if self.num_generating else []
        return "\n".join(lines)


logger = logging.getLogger(__name__)
GENERATION = "generate() runs"
NUM_CALLS = 10  # training calls before the warning
NOT_ALIKE = "no two sequences of a batch began alike, or not for as many tokens as min_shared_tokens requires"
HELP_NOT_ALIKE = f"{NOT_ALIKE}. Larger batches help, and sequences with the same prompt next to each other in the data"


@dataclass(eq=False)
class SharingWatch:
    """Counts the training calls of a model until one shares something, or a warning says that none did."""

    name: str
    num_calls: int = 0
    is_done: bool = False

    def count(self, backbone: PreTrainedModel, shares: bool, why: object) -> None:
        """Count a call, unless it is an evaluation, a generation, or that of a preference loss's reference model.

        why: what the warning says if this call shares nothing either.
        """
        if self.is_done or not (backbone.training and torch.is_grad_enabled()):
            return
        watch_steps()
        self.num_calls += 1
        self.is_done = shares or self.num_calls == NUM_CALLS
        if self.is_done and not shares and not is_frozen(backbone):
            logger.warning("the first %d training batches of %s shared nothing: %s", NUM_CALLS, self.name, why)


def is_frozen(backbone: PreTrainedModel) -> bool:
    """Return whether nothing is trained, as in a reference or reward model."""
    return not any(parameter.requires_grad for parameter in backbone.parameters())


@cache
def watch_steps() -> None:
    """Look at the weights of whatever optimizer takes a step in this process. `restore_model` does not end it."""
    register_optimizer_step_pre_hook(warn_of_rounding)


def warn_of_rounding(optimizer: Optimizer, *_: object) -> None:
    """Warn if the optimizer changes weights of 16 bits. Takes 20 us for 300 weights."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    for dtype in {weight.dtype for weight in weights if weight.grad is not None}:  # frozen ones do not change
        if dtype.itemsize == 2:
            _warn(dtype)


@cache
def _warn(dtype: torch.dtype) -> None:
    logger.warning(
        "the optimizer changes weights in %s: unless it keeps float32 copies, an update of less than %.2f %% of a "
        "weight is rounded away. Load the model with dtype=torch.float32 and compute in 16 bits by autocast "
        "(bf16=True; in fit model.dtype: float32, trainer.precision: bf16-mixed), or take an optimizer that keeps them",
        dtype,
        25 * torch.finfo(dtype).eps,  # a quarter of it may move a number, less never does
    )
