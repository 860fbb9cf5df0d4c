"""Micro-batches of the user's own data, timed on a model of the same shape with fewer layers and random weights.

No weights are read. Both arms run in one process and take turns, so that a machine that slows down slows both. The
timed work is that of `fit`: forward and backward of a micro-batch; clipping and the optimizer of a step.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from radixtrain.collators.steps import StepCollator
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.prepare import prepare_model, restore_model
from radixtrain.report.sharing import Counts, Features, ordinary_counts, radix_counts
from radixtrain.timing import added_bytes, held_bytes, seconds_in_turns, seconds_of

ArmName = Literal["radix", "ordinary"]
ARMS: tuple[ArmName, ...] = ("radix", "ordinary")
PARTS = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of a step to try as micro-batches: from one sequence to all
REPEATS = 3  # keep the minimum: other load can only slow a run down


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The training of a run, without its weights.

    build: number of layers, device -> the model with random weights, in training mode and in the dtype of the run, with
        its adapters and activation checkpointing, not prepared.
    optimizer, moment_bytes: of such a model. forward: the context of a forward pass, autocast for instance.
    num_layers: of the whole model. period: layers after which their kinds repeat, 1 if all are alike. A layer that
        recomputes its activations is of another kind than one that keeps them.
    dtype: of the computation.
    """

    build: Callable[[int, torch.device], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    moment_bytes: Callable[[nn.Module], int]
    forward: Callable[[], AbstractContextManager[Any]]
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    period: int = 1
    attention: str = "auto"
    kernel: str = "auto"
    allow_dropout: tuple[str, ...] = ()
    max_grad_norm: float = 1.0


@dataclass(frozen=True, eq=False)
class Case:
    """A micro-batch of one arm, on the host."""

    arm: ArmName
    counts: Counts
    batch: dict[str, Any]
    num_labels: int


def cases_of(steps: Iterable[Features], collator: StepCollator) -> list[Case]:
    """Make micro-batches for both arms, of these steps and of parts of them, from the smallest to the largest.

    collator: with `dedup`, as in training. Takes the first and the last micro-batch of each step.
    """
    cases: list[Case] = []
    for number, features in enumerate(steps):
        for part in PARTS if number == 0 else PARTS[-1:]:
            some = features[: max(1, round(part * len(features)))]
            step, padded = collator(some), replace(collator, dedup=False)(some)
            for index in {0, len(step.micro_batches) - 1}:
                batch = step.micro_batches[index]
                cases.append(Case("radix", radix_counts(batch), batch, step.num_labels))
            for batch in padded.micro_batches[:1] + padded.micro_batches[1:][-1:]:
                cases.append(Case("ordinary", ordinary_counts(batch), batch, padded.num_labels))
    different = {(case.arm, case.counts): case for case in cases}
    return sorted(different.values(), key=lambda case: case.counts.rows)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Measurements on a model of that many layers.

    seconds: of each case. peaks: bytes that the smallest and the largest case of each arm add to weights and gradients.
    held: bytes of these that live from the forward pass to the backward pass.
    optimizer_seconds: of clipping and the optimizer's step.
    cpu_share: part of the time for which this thread had a core; 1 on a GPU, where it waits.
    """

    num_layers: int
    cpu_share: float
    seconds: dict[Case, float]
    peaks: dict[Case, int]
    held: dict[Case, int]
    optimizer_seconds: float


def time_cases(
    setup: RunSetup,
    num_layers: int,
    cases: Sequence[Case],
    max_seconds: float = math.inf,
    max_bytes: float = math.inf,
) -> Timings:
    """Time cases on a model of that many layers, as many as time and memory allow, and at least the smallest ones.

    cases: of the arms, from the smallest to the largest.
    max_seconds: for all of them. max_bytes: that a case may add to weights, gradients and optimizer.
    """
    model = setup.build(num_layers, setup.device)
    runner = _Runner(setup, model)
    try:
        with without_messages():
            chosen, peaks = runner.affordable(cases, max_seconds, max_bytes)
            wall, cpu = time.perf_counter(), time.thread_time()
            seconds = runner.seconds(chosen)
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            optimizer_seconds = runner.optimizer_seconds()
            peaks |= {case: runner.peak(case) for case in _one_of_each_arm(reversed(chosen)) if case not in peaks}
            held = {case: runner.held(case) for case in peaks}
        return Timings(
            num_layers=num_layers,
            cpu_share=cpu / wall if setup.device.type == "cpu" else 1.0,
            seconds=seconds,
            peaks=peaks,
            held=held,
            optimizer_seconds=optimizer_seconds,
        )
    finally:
        restore_model(model)
        del model, runner
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def without_messages() -> Iterator[None]:
    """Silence the log lines of a model about its layers and, once it is prepared, its first batches."""
    logger = logging.getLogger("radixtrain.hf")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _one_of_each_arm(cases: Iterable[Case]) -> list[Case]:
    """Return the first case of each arm."""
    firsts: dict[ArmName, Case] = {}
    for case in cases:
        firsts.setdefault(case.arm, case)
    return [firsts[arm] for arm in ARMS if arm in firsts]


class _Runner:
    """Runs cases on a model."""

    def __init__(self, setup: RunSetup, model: Any):
        self.setup, self.model = setup, model
        self.plain_head = has_plain_head(model)
        self.optimizer = setup.optimizer(model)

    def enter(self, arm: ArmName) -> None:
        """Make the model ready for the batches of an arm."""
        if arm == "ordinary":
            restore_model(self.model)
        else:
            options = {name: getattr(self.setup, name) for name in ("attention", "kernel", "allow_dropout")}
            prepare_model(self.model, **options)

    def run(self, case: Case) -> None:
        """Run forward and backward. Gradients are added to those that are there."""
        self.loss(case).backward()

    def loss(self, case: Case) -> Tensor:
        """Run the forward pass."""
        batch = {name: x.to(self.setup.device) for name, x in case.batch.items()}
        with self.setup.forward():
            return forward_rows(self.model, batch, self.plain_head).loss_sum() / case.num_labels

    def peak(self, case: Case) -> int:
        """Count the bytes that the case adds to weights, gradients and its batch."""
        self.enter(case.arm)
        return added_bytes(self.model, partial(self.run, case))

    def held(self, case: Case) -> int:
        """Count those bytes that live after the forward pass."""
        self.enter(case.arm)
        return held_bytes(partial(self.loss, case), self.setup.device)

    def affordable(
        self, cases: Sequence[Case], max_seconds: float, max_bytes: float
    ) -> tuple[list[Case], dict[Case, int]]:
        """Return the cases that time and memory allow, from the smallest to the largest, and the peaks of the smallest.

        The cost of a case is estimated from the cost per row of the smallest. Each may take half of the time left,
        the largest first, since a prediction is good near the sizes that were timed.
        """
        smallest = _one_of_each_arm(cases)
        peaks = {case: self.peak(case) for case in smallest}  # warms up, too
        seconds, row_bytes = {}, {}
        for case in smallest:
            self.enter(case.arm)
            seconds[case.arm] = seconds_of(partial(self.run, case), self.setup.device) / case.counts.rows
            row_bytes[case.arm] = peaks[case] / case.counts.rows
        chosen = [*smallest]
        for case in reversed(cases):
            needed = REPEATS * seconds[case.arm] * case.counts.rows
            fits = row_bytes[case.arm] * case.counts.rows <= max_bytes
            if fits and needed <= max_seconds / 2 and case not in chosen:
                chosen.append(case)
                max_seconds -= needed
        return [case for case in cases if case in chosen], peaks

    def seconds(self, cases: Sequence[Case]) -> dict[Case, float]:
        """Return the fastest run of each, alternating the arms. Each turn of an arm begins without gradients."""
        in_arms = sorted(cases, key=lambda case: ARMS.index(case.arm))
        first = _one_of_each_arm(in_arms)

        def before(case: Case) -> None:
            if case in first:
                self.enter(case.arm)
                self.model.zero_grad(set_to_none=True)

        turns = seconds_in_turns(
            {case: partial(self.run, case) for case in in_arms}, self.setup.device, REPEATS, before=before
        )
        return {case: min(turns[case]) for case in cases}

    def optimizer_seconds(self) -> float:
        """Time a step with the gradients that are there."""
        trained = [p for p in self.model.parameters() if p.grad is not None]

        def step() -> None:
            nn.utils.clip_grad_norm_(trained, self.setup.max_grad_norm or math.inf)
            self.optimizer.step()

        return min(seconds_of(step, self.setup.device) for _ in range(REPEATS))
