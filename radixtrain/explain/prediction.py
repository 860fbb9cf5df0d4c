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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from radixtrain.collators.prefix_sampler import batches_of
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.steps import StepSampler, conversation_groups, epoch_size, features_of, grouped_order, whole_chats
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.share import restore_model, share_prefixes
from radixtrain.screen import logged_from
from radixtrain.timing import peak_bytes, seconds_of
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import PrefixGroups

BATCH_SIZES = (8, 16, 32, 64, 128, 256)  # to compare with the user's
LARGER = (2, 4)  # times `max_tokens`
MAX_STEPS = 16
COUNTED_TOKENS = 1_000_000  # steps are counted until they hold that many
QUANTILES = {"min": 0.0, "10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
SHORTEST_PROMPT = 16  # tokens, the resolution of `find_prefix_groups`

ArmName = Literal["radix", "ordinary"]
ARMS: tuple[ArmName, ...] = ("radix", "ordinary")
PARTS = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of a step to time, from one sequence to all
REPEATS = 3  # keep the minimum: other load can only slow a run down
DEEPER = 3  # times the layers of the shorter model
SPARE = 0.5  # part of the free memory that the timed model may take
# Time that `fit` spends between two optimizer steps: its loop and the log, on an x86-64 core.
STEP_SECONDS = 8e-3

Features = Sequence[Mapping[str, Any]]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """The settings that affect sharing: the keys of `data` with these names. A plain shuffle is False, not 1."""

    batch_size: int
    max_tokens: int
    group_by_prefix: bool | int = False


@dataclass(frozen=True, kw_only=True)
class SampledSteps:
    """Some steps of an epoch, counted together.

    scale: conversations of the epoch per conversation of these steps.
    num_tokens: of the rows. num_whole_tokens: of the whole chats; the same if no chat is split into its turns.
    radix, ordinary: rows that every layer computes: unique tokens; and padded ones of whole chats.
    """

    draw: Draw
    num_steps: int
    scale: float
    num_tokens: int
    num_whole_tokens: int
    radix: int
    ordinary: int

    @property
    def r(self) -> float:
        """Return tokens of whole chats per computed token."""
        return self.num_whole_tokens / self.radix

    @property
    def rows_r(self) -> float | None:
        """Return tokens of the turns per computed token, if chats are split into them."""
        return self.num_tokens / self.radix if self.num_tokens != self.num_whole_tokens else None


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

    @cached_property
    def groups(self) -> PrefixGroups:
        """Group conversations that begin alike. Reads every conversation once."""
        return conversation_groups(self.conversations)

    def sampled(self, draw: Draw) -> SampledSteps:
        """Sample steps of the first epoch, until they hold `COUNTED_TOKENS`: the same for one batch size and order.

        A last step that holds fewer conversations than the others is left out, unless it is the only one.
        """
        steps, num_drawn = [], 0
        for batch in self.batches(draw):
            steps.append([self.collator_of(arm, draw)(self.features(arm, batch)) for arm in ARMS])
            num_drawn += len(batch)
            if sum(radix.num_tokens for radix, _ in steps) > COUNTED_TOKENS:
                break
        radix, ordinary = zip(*steps, strict=True)
        return SampledSteps(
            draw=draw,
            num_steps=len(steps),
            scale=self.size / num_drawn,
            num_tokens=sum(step.num_tokens for step in radix),
            num_whole_tokens=sum(step.num_tokens for step in ordinary),
            radix=sum(num_rows(batch) for step in radix for batch in step.micro_batches),
            ordinary=sum(num_rows(batch) for step in ordinary for batch in step.micro_batches),
        )

    def collator_of(self, arm: ArmName, draw: Draw) -> StepCollator:
        return replace(self.collator, max_tokens=draw.max_tokens, dedup=arm == "radix")

    def features(self, arm: ArmName, batch: Sequence[int]) -> Features:
        """Return the sequences of these conversations; for the ordinary arm whole chats, with as many labels."""
        conversations = [self.conversations[index] for index in batch]
        if arm == "radix":
            return features_of(sample for samples in conversations for sample in samples)
        found = []
        for samples in conversations:
            for sample, (length, num_labels) in zip(samples[::-1], whole_chats(samples)[::-1], strict=False):
                labels = np.where(np.arange(length) < length - num_labels, IGNORE_INDEX, sample.input_ids)
                found.append({"input_ids": sample.input_ids, "labels": labels})
        return found

    def batches(self, draw: Draw) -> list[list[int]]:
        """Return the conversations of some full steps."""
        size, wanted = draw.batch_size, draw.group_by_prefix
        wanted = wanted if isinstance(wanted, bool) else min(wanted, size)
        groups = self.groups if wanted else None
        grouping = grouped_order(self.conversations, size, wanted, self.seed, groups)
        sampler = StepSampler(len(self.conversations), size, self.shuffle, self.seed, grouping, self.weights)
        return batches_of(sampler.order()[: max(self.size // size, 1) * size], size, MAX_STEPS)

    def others(self, own: Draw) -> dict[str, list[Draw]]:
        """Return draws that differ from the user's in one key, and may share more, by that key."""
        sizes = [size for size in BATCH_SIZES if own.batch_size < size <= self.size]
        return {
            "max_tokens": [replace(own, max_tokens=factor * own.max_tokens) for factor in LARGER],
            "group_by_prefix": [replace(own, group_by_prefix=True)] if self.shuffle else [],
            "batch_size": [replace(own, batch_size=size) for size in sizes],
        }

    def timed_batches(self, draw: Draw) -> dict[ArmName, list[Batch]]:
        """Return the first micro-batch of a step and of parts of it, from the smallest to the largest, by arm."""
        batch, found = self.batches(draw)[0], {}
        for arm in ARMS:
            features, collator = self.features(arm, batch), self.collator_of(arm, draw)
            parts = (features[: max(1, round(part * len(features)))] for part in PARTS)
            found[arm] = sorted((collator(part).micro_batches[0] for part in parts), key=num_rows)
        return found


def num_rows(batch: Batch) -> int:
    """Count the rows that every layer computes: unique tokens, or padded ones."""
    return batch["input_ids"].numel()


def length_quantiles(lengths: IntArray) -> dict[str, int]:
    """Return the tokens of the shortest sample, of the median, ..., of the longest."""
    values = np.quantile(lengths, list(QUANTILES.values()), method="nearest")
    return dict(zip(QUANTILES, map(int, values), strict=True))


def num_shared_prompts(groups: PrefixGroups) -> int:
    """Count distinct prompts: beginnings of at least 16 tokens that several conversations share until they diverge.

    If a longer shared beginning continues a shorter one, only the longer counts. One that saves less than a tenth of
    its conversations' tokens is not a prompt, see `find_prefix_groups`: questions start with the same words by
    accident.
    """
    return groups.num_innermost or int(groups.common >= SHORTEST_PROMPT)


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The training of a run, without its weights.

    build: number of layers, device -> the model with random weights, in training mode and in the dtype of the run, with
        its adapters and activation checkpointing, not shared.
    optimizer: of such a model. forward: the context of a forward pass, autocast for instance.
    share: makes such a model run on unique tokens.
    num_layers: of the whole model. period: layers after which their kinds repeat, 1 if all are alike. A layer that
        recomputes its activations is of another kind than one that keeps them.
    dtype: of the computation.
    """

    build: Callable[[int, torch.device], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    forward: Callable[[], AbstractContextManager[Any]]
    share: Callable[[nn.Module], object] = share_prefixes
    period: int = 1
    max_grad_norm: float = 1.0


class StepPrediction(NamedTuple):
    """Seconds of steps on this machine. timed_layers: of the models that were timed."""

    seconds_per_row: Mapping[ArmName, float]
    optimizer_seconds: float
    timed_layers: tuple[int, ...]

    def seconds(self, sampled: SampledSteps, arm: ArmName) -> float:
        """Predict the seconds of these steps, if they do not wait for the collator."""
        rows = sampled.radix if arm == "radix" else sampled.ordinary
        return rows * self.seconds_per_row[arm] + sampled.num_steps * (self.optimizer_seconds + STEP_SECONDS)


class Timings(NamedTuple):
    """Measurements on a model of fewer layers: the batch of each arm that was timed, its seconds, the optimizer's."""

    batches: dict[ArmName, Batch]
    seconds: dict[ArmName, float]
    optimizer_seconds: float


def predict_steps(setup: RunSetup, batches: Mapping[ArmName, Sequence[Batch]], max_seconds: float) -> StepPrediction:
    """Time a micro-batch of each arm: the largest of these that time and memory allow.

    batches: from the smallest to the largest.

    Takes about `max_seconds`, more if the smallest micro-batch of each arm takes that long. Raises UserError if
    the free memory does not hold the cut model.
    """
    depths = (setup.period, DEEPER * setup.period) if DEEPER * setup.period < setup.num_layers else (setup.num_layers,)
    free, needed = free_bytes(setup.device), _state_bytes(setup, depths[-1])
    if needed > SPARE * free:
        raise UserError(
            f"{depths[-1]} of its {setup.num_layers} layers with gradients and optimizer need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here"
        )
    high = time_batches(setup, depths[-1], batches, max_seconds * depths[-1] / sum(depths), SPARE * free - needed)
    low = high if len(depths) == 1 else time_batches(setup, depths[0], {arm: [high.batches[arm]] for arm in ARMS})
    more = (setup.num_layers - depths[-1]) / (depths[-1] - depths[0] or 1)  # as often as what lies between the two

    def whole(of_low: float, of_high: float) -> float:
        return of_high + more * max(of_high - of_low, 0.0)

    return StepPrediction(
        {arm: whole(low.seconds[arm], high.seconds[arm]) / num_rows(high.batches[arm]) for arm in ARMS},
        whole(low.optimizer_seconds, high.optimizer_seconds),
        depths,
    )


def free_bytes(device: torch.device) -> float:
    """Return the memory that a process can still get on a device. On the host it is read from /proc.

    On CUDA that includes what torch's allocator keeps of tensors that are gone, which the driver counts as used.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
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
) -> Timings:
    """Time the largest batch of each arm that time and memory allow, on a model of that many layers.

    batches: of each arm, from the smallest to the largest.
    max_seconds: for all of them. max_bytes: that a batch may add to weights, gradients and optimizer.
    """
    timed = _TimedModel(setup, num_layers)
    try:
        with without_messages():
            chosen = {arm: timed.largest(arm, batches[arm], max_seconds / len(ARMS), max_bytes) for arm in ARMS}
            return Timings(chosen, timed.seconds(chosen), timed.optimizer_seconds())
    finally:
        restore_model(timed.model)
        del timed
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def without_messages() -> AbstractContextManager[None]:
    """Silence the log lines of a model about its layers and, once it is shared, its first batches."""
    return logged_from(logging.WARNING, "radixtrain.hf")


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

    def seconds(self, batches: Mapping[ArmName, Batch]) -> dict[ArmName, float]:
        """Return the fastest run of each, alternating the arms."""
        fastest = dict.fromkeys(ARMS, math.inf)
        for _ in range(REPEATS):
            for arm in ARMS:
                self.enter(arm)
                fastest[arm] = min(fastest[arm], self.timed(partial(self.run, batches[arm])))
        return fastest

    def timed(self, run: Callable[[], object]) -> float:
        """Time a run. On a CPU only the time counts for which this thread had a core: other programs take the rest."""
        if self.setup.device.type != "cpu":
            return seconds_of(run, self.setup.device)
        start = time.thread_time()
        run()
        return time.thread_time() - start

    def optimizer_seconds(self) -> float:
        """Time clipping and a step with the gradients that are there."""
        trained = [p for p in self.model.parameters() if p.grad is not None]

        def step() -> None:
            nn.utils.clip_grad_norm_(trained, self.setup.max_grad_norm or math.inf)
            self.optimizer.step()

        return min(self.timed(step) for _ in range(REPEATS))
