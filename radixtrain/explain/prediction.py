"""How much the steps of an epoch share, counted on a sample of them, and how fast they run, timed on this machine.

r depends on which conversations make a step (`batch_size`, `group_by_prefix`) and on how a step is cut (`max_tokens`).
The first epoch is drawn as `fit` draws it, and some of its steps, at equal distances, are collated as `fit` does. How
many depends on their tokens and not on the clock, so that r is the same however busy the machine is.

A micro-batch of each arm is timed on a model with random weights and few layers, at two depths. Every further layer is
taken to cost as much as those between the two, every row as much as those of this micro-batch.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from radixtrain.collators.prefix_sampler import batches_of
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.steps import StepSampler, epoch_size, features_of, grouped_order, whole_chats
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.share import restore_model, share_prefixes
from radixtrain.screen import logged_from
from radixtrain.timing import peak_bytes, seconds_of

LARGER = (2, 4, 8)  # times the user's `batch_size` and `max_tokens`
MAX_STEPS = 16
COUNTED_TOKENS = 1_000_000  # steps are counted until they hold that many

ArmName = Literal["radix", "ordinary"]
ARMS: tuple[ArmName, ...] = ("radix", "ordinary")
OPTIMIZER = "optimizer"  # clipping and its step
PARTS = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of a step to time, from one conversation to all
REPEATS = 3  # keep the minimum: other load can only slow a run down
DEEPER = 3  # times the layers of the shorter model
SPARE = 0.5  # part of the free memory that the timed model may take
# Time that `fit` spends between two optimizer steps: its loop and the log, on an x86-64 core.
STEP_SECONDS = 8e-3

Batch = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """The settings that affect sharing: the keys of `data` with these names."""

    batch_size: int
    max_tokens: int
    group_by_prefix: bool | int = False


@dataclass(frozen=True, kw_only=True)
class SampledSteps:
    """Some steps of an epoch, counted together.

    scale: conversations of the epoch per conversation of these steps.
    num_tokens: by arm: of the sequences; for the ordinary one of whole chats, the same if none is split into its turns.
    num_rows: by arm: that every layer computes: unique tokens, or padded ones.
    """

    draw: Draw
    num_steps: int
    scale: float
    num_tokens: dict[ArmName, int]
    num_rows: dict[ArmName, int]

    @property
    def r(self) -> float:
        """Return tokens of whole chats per computed token."""
        return self.num_tokens["ordinary"] / self.num_rows["radix"]

    @property
    def rows_r(self) -> float:
        """Return tokens of the sequences per computed token: more, if chats are split into their turns."""
        return self.num_tokens["radix"] / self.num_rows["radix"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Epoch:
    """The conversations of an epoch, and how they are drawn.

    weights: how often each conversation occurs, as for `StepSampler`.
    collator: with `dedup`; its `max_tokens` is replaced.
    """

    conversations: Sequence[Sequence[TokenRow]]
    seed: int
    shuffle: bool
    collator: StepCollator
    weights: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Count conversations, each as often as it occurs."""
        return len(self.conversations) if self.weights is None else epoch_size(self.weights)

    def sampled(self, draw: Draw) -> SampledSteps:
        """Sample steps of the first epoch, until they hold `COUNTED_TOKENS`: the same for one batch size and order.

        A last step that holds fewer conversations than the others is left out, unless it is the only one.
        """
        steps: dict[ArmName, list[Step]] = {arm: [] for arm in ARMS}
        for batch in self.batches(draw):  # all of one size
            for arm in ARMS:
                steps[arm].append(self.step(arm, draw, batch))
            if sum(step.num_tokens for step in steps["radix"]) > COUNTED_TOKENS:
                break
        return SampledSteps(
            draw=draw,
            num_steps=len(steps["radix"]),
            scale=self.size / len(batch) / len(steps["radix"]),
            num_tokens={arm: sum(step.num_tokens for step in steps[arm]) for arm in ARMS},
            num_rows={arm: sum(step.num_computed_tokens for step in steps[arm]) for arm in ARMS},
        )

    def step(self, arm: ArmName, draw: Draw, batch: Sequence[int]) -> Step:
        """Collate these conversations as a step; for the ordinary arm as whole chats, with as many labels."""
        conversations = [self.conversations[index] for index in batch]
        features = features_of(chain(*conversations)) if arm == "radix" else []
        for samples in conversations if arm == "ordinary" else ():
            for sample, (length, num_labels) in zip(samples[::-1], whole_chats(samples)[::-1], strict=False):
                labels = np.where(np.arange(length) < length - num_labels, IGNORE_INDEX, sample.input_ids)
                features.append({"input_ids": sample.input_ids, "labels": labels})
        return replace(self.collator, max_tokens=draw.max_tokens, dedup=arm == "radix")(features)

    def batches(self, draw: Draw) -> list[list[int]]:
        """Return the conversations of some full steps."""
        size = draw.batch_size
        grouping = grouped_order(self.conversations, size, draw.group_by_prefix, self.seed)
        sampler = StepSampler(len(self.conversations), size, self.shuffle, self.seed, grouping, self.weights)
        return batches_of(sampler.order()[: max(self.size // size, 1) * size], size, MAX_STEPS)

    def others(self, own: Draw) -> dict[str, list[Draw]]:
        """Return draws that differ from the user's in one key, and may share more, by that key."""
        sizes = [factor * own.batch_size for factor in LARGER if factor * own.batch_size <= self.size]
        return {
            "max_tokens": [replace(own, max_tokens=factor * own.max_tokens) for factor in LARGER],
            "group_by_prefix": [replace(own, group_by_prefix=True)] if self.shuffle else [],
            "batch_size": [replace(own, batch_size=size) for size in sizes],
        }

    def timed_batches(self, draw: Draw) -> dict[ArmName, list[Batch]]:
        """Return the first micro-batch of a step and of parts of it, from the smallest to the largest, by arm."""
        batch, *_ = self.batches(draw)
        parts = [batch[: max(1, round(part * len(batch)))] for part in PARTS]
        return {
            arm: sorted((self.step(arm, draw, part).micro_batches[0] for part in parts), key=num_rows) for arm in ARMS
        }


def num_rows(batch: Batch) -> int:
    """Count the rows that every layer computes: unique tokens, or padded ones."""
    return batch["input_ids"].numel()


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The training of a run, without its weights.

    build: number of layers, device -> the model with random weights, in training mode and in the dtype of the run, with
        its adapters and activation checkpointing, not shared.
    optimizer: of such a model. forward: the context of a forward pass, autocast for instance.
    share: makes such a model run on unique tokens.
    num_layers: of the whole model. period: layers after which their kinds repeat, 1 if all are alike. A layer that
        recomputes its activations is of another kind than one that keeps them.
    """

    build: Callable[[int, torch.device], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    device: torch.device
    num_layers: int
    forward: Callable[[], AbstractContextManager[Any]]
    share: Callable[[nn.Module], object] = share_prefixes
    period: int = 1


def predict_seconds(
    setup: RunSetup, batches: Mapping[ArmName, Sequence[Batch]], sampled: SampledSteps, max_seconds: float
) -> tuple[dict[ArmName, float], tuple[int, ...]]:
    """Predict the seconds of steps by arm, if they do not wait for the collator, and name the layers that were timed.

    batches: of each arm, from the smallest to the largest: the largest is timed that time and memory allow.

    Takes about `max_seconds`, more if the smallest micro-batch of each arm takes that long.

    Raises NotPredictedError if the free memory does not hold the cut model, and UserError if it cannot be shared.
    """
    depths = (setup.period, DEEPER * setup.period) if DEEPER * setup.period < setup.num_layers else (setup.num_layers,)
    free, needed = free_bytes(setup.device), _state_bytes(setup, depths[-1])
    if needed > SPARE * free:
        raise NotPredictedError(
            f"{depths[-1]} of its {setup.num_layers} layers with gradients and optimizer need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here"
        )
    share = depths[-1] / sum(depths)
    chosen, seconds = time_batches(setup, depths[-1], batches, share * max_seconds, SPARE * free - needed)
    if len(depths) > 1:
        _, low = time_batches(setup, depths[0], {arm: [batch] for arm, batch in chosen.items()})
        more = (setup.num_layers - depths[-1]) / (depths[-1] - depths[0])  # as often as what lies between the two
        seconds = {name: high + more * max(high - low[name], 0.0) for name, high in seconds.items()}
    overhead = sampled.num_steps * (seconds[OPTIMIZER] + STEP_SECONDS)
    per_row = {arm: seconds[arm] / num_rows(batch) for arm, batch in chosen.items()}
    return {arm: sampled.num_rows[arm] * per_row[arm] + overhead for arm in ARMS}, depths


def free_bytes(device: torch.device) -> float:
    """Return the memory that is free on a device. On the host it is read from /proc."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _state_bytes(setup: RunSetup, num_layers: int) -> int:
    """Count bytes of weights, gradients and AdamW's moments of such a model, without allocating it."""
    model = setup.build(num_layers, torch.device("meta"))
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())


def time_batches(
    setup: RunSetup,
    num_layers: int,
    batches: Mapping[ArmName, Sequence[Batch]],
    max_seconds: float = math.inf,
    max_bytes: float = math.inf,
) -> tuple[dict[ArmName, Batch], dict[str, float]]:
    """Time the largest batch of each arm that time and memory allow, on a model of that many layers.

    batches: of each arm, from the smallest to the largest.
    max_seconds: for both arms. max_bytes: that a batch may add to weights, gradients and optimizer.

    Returns the batches, and the seconds of each arm and of the optimizer.
    """
    timed = _TimedModel(setup, num_layers)
    try:
        with without_messages():
            chosen = {arm: timed.largest(arm, batches[arm], max_seconds / 2, max_bytes) for arm in ARMS}
            return chosen, timed.seconds(chosen)
    finally:
        restore_model(timed.model)
        del timed
        gc.collect()  # a shared model is in cycles


def without_messages() -> AbstractContextManager[None]:
    """Silence the log lines of a model about its layers and, once it is shared, its first batches."""
    return logged_from(logging.WARNING, "radixtrain.hf")


class NotPredictedError(UserError):
    """A model that this machine cannot time. The message says why."""


class _TimedModel:
    """Runs batches on a model: unique tokens if it is shared, padded ones if it is Hugging Face's unchanged one.

    Both with the loss of `fit`, fused with the head if that is one matrix.
    """

    def __init__(self, setup: RunSetup, num_layers: int):
        self.setup, self.model = setup, setup.build(num_layers, setup.device)
        self.plain_head, self.optimizer = has_plain_head(self.model), setup.optimizer(self.model)

    def enter(self, arm: ArmName) -> None:
        """Make the model ready for the batches of an arm."""
        (self.setup.share if arm == "radix" else restore_model)(self.model)

    def run(self, batch: Batch) -> None:
        """Run forward and backward. Gradients are added to those that are there."""
        on_device = {name: x.to(self.setup.device) for name, x in batch.items()}
        with self.setup.forward():
            loss = forward_rows(self.model, on_device, self.plain_head).loss_sum()
        loss.backward()

    def largest(self, arm: ArmName, batches: Sequence[Batch], max_seconds: float, max_bytes: float) -> Batch:
        """Return the largest batch that time and memory allow by what a row of the smallest takes; that in any case."""
        self.enter(arm)
        run = partial(self.run, batches[0])
        run()  # from here on there are gradients, and the machine is warm
        size, seconds = peak_bytes(run, self.setup.device), REPEATS * self.timed(run)
        most = num_rows(batches[0]) * min(max_seconds / seconds, max_bytes / size)
        return max((batch for batch in batches if num_rows(batch) <= most), key=num_rows, default=batches[0])

    def seconds(self, batches: Mapping[ArmName, Batch]) -> dict[str, float]:
        """Return the fastest run of each, alternating the arms, and of the optimizer with the gradients of both."""
        fastest: dict[str, float] = dict.fromkeys((*ARMS, OPTIMIZER), math.inf)
        for _ in range(REPEATS):
            for arm in ARMS:
                self.enter(arm)
                fastest[arm] = min(fastest[arm], self.timed(partial(self.run, batches[arm])))
            fastest[OPTIMIZER] = min(fastest[OPTIMIZER], self.timed(self.step))
        return fastest

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def timed(self, run: Callable[[], object]) -> float:
        """Time a run. On a CPU only the time counts for which this thread had a core: other programs take the rest."""
        if self.setup.device.type != "cpu":
            return seconds_of(run, self.setup.device)
        start = time.thread_time()
        run()
        return time.thread_time() - start
