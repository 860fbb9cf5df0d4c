"""Predicts the time and memory of a step on this machine: micro-batches of the user's own data, timed on fewer layers.

No weights are read. Both arms run in one process and take turns, so that a machine that slows down slows both. The
timed work is that of `fit`: forward and backward of a micro-batch; clipping and the optimizer of a step. Two depths are
timed, and every further layer is taken to cost as much as those between them: with 1 and 3 layers, the 28th costs half
of the difference. Seconds
are interpolated between the micro-batches of an arm by the rows that they compute, and are proportional to the rows
beyond the largest: other settings cut the same data into other sizes. A step adds clipping, the optimizer, and the
overhead of a step of `fit`.

Peak memory is that of the deeper model plus, for every further layer, what lives after its forward pass. The peaks do
not give the slope: in a model of few layers, the gradient of the embeddings may exceed all activations. It is linear in
the rows, and added to weights, gradients and the optimizer's moments. The process itself and what allocators keep come
on top.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.explain.sharing import Features, SampledSteps
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.share import restore_model, share_prefixes
from radixtrain.screen import logged_from
from radixtrain.timing import held_bytes, peak_bytes, seconds_of

ArmName = Literal["radix", "ordinary"]
ARMS: tuple[ArmName, ...] = ("radix", "ordinary")
PARTS = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of a step to try as micro-batches: from one sequence to all
REPEATS = 3  # keep the minimum: other load can only slow a run down
DEEPER = 3  # times the layers of the shorter model
SPARE = 0.5  # part of the free memory that the timed model may take
# Time that `fit` spends between two optimizer steps: its loop and the log, on an x86-64 core.
STEP_SECONDS = 8e-3


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The training of a run, without its weights.

    build: number of layers, device -> the model with random weights, in training mode and in the dtype of the run, with
        its adapters and activation checkpointing, not shared.
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
    batch: dict[str, Any]
    num_labels: int

    @property
    def rows(self) -> int:
        """Count the rows that every layer computes: unique tokens, or padded ones."""
        return self.batch["input_ids"].numel()


def cases_of(arm: ArmName, steps: Sequence[Features], collator: StepCollator) -> list[Case]:
    """Make micro-batches of an arm, of these steps and of parts of the first, from the smallest to the largest.

    collator: of the arm. Takes the first and the last micro-batch of each step.
    """
    parts = [steps[0][: max(1, round(part * len(steps[0])))] for part in PARTS]
    collated = [collator(features) for features in (*parts, *steps[1:])]
    cases = [Case(arm, step.micro_batches[end], step.num_labels) for step in collated for end in (0, -1)]
    return sorted({case.rows: case for case in cases}.values(), key=lambda case: case.rows)


Points = list[tuple[int, float]]  # rows, and the seconds or bytes of a micro-batch with that many


class StepPrediction(NamedTuple):
    """Seconds and bytes of steps on this machine.

    radix, ordinary: seconds of micro-batches of each arm. peak: bytes of radix ones.
    optimizer_seconds: of a step. state_bytes: weights, gradients and moments.
    waits_for_collator: whether a step waits until it is collated.
    timed_layers: of the models that were timed. cpu_share: see `Timings`.
    """

    radix: Points
    ordinary: Points
    peak: Points
    optimizer_seconds: float
    state_bytes: int
    waits_for_collator: bool
    timed_layers: tuple[int, ...]
    cpu_share: float

    def seconds(self, sampled: SampledSteps, arm: ArmName = "radix") -> float:
        """Predict the seconds of these steps."""
        points, rows = (self.radix, sampled.radix) if arm == "radix" else (self.ordinary, sampled.ordinary)
        collating = sampled.collate_seconds if self.waits_for_collator and arm == "radix" else 0.0
        overhead = sampled.num_steps * (self.optimizer_seconds + STEP_SECONDS)
        return sum(_at(points, each) for each in rows) + overhead + collating

    def memory_bytes(self, sampled: SampledSteps) -> int:
        """Predict the peak bytes of a step in torch's tensors: those of the micro-batch that needs most."""
        return round(self.state_bytes + _at(self.peak, max(sampled.radix)))


def _at(points: Points, rows: int) -> float:
    """Interpolate between points, which begin at 0; beyond the largest, in proportion to its rows."""
    (*_, (most, value)), (xs, ys) = points, zip((0, 0.0), *points, strict=True)
    return value * rows / most if rows > most else float(np.interp(rows, list(xs), list(ys)))


def predict_steps(setup: RunSetup, cases: Sequence[Case], num_workers: int, max_seconds: float) -> StepPrediction:
    """Time these micro-batches and fit the rates.

    num_workers: processes that collate while a step runs.

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
    last = time_cases(setup, depths[-1], cases, max_seconds * depths[-1] / sum(depths), SPARE * free - needed)
    first = last if len(depths) == 1 else time_cases(setup, depths[0], list(last.seconds))
    more = (setup.num_layers - depths[-1]) / (depths[-1] - depths[0] or 1)  # as often as what lies between the two

    def whole(low: float, high: float) -> float:
        return high + more * max(high - low, 0.0)

    seconds: dict[ArmName, Points] = {"radix": [], "ordinary": []}
    for case, high in last.seconds.items():
        seconds[case.arm].append((case.rows, whole(first.seconds[case], high)))
    held = ((case, last.held[case] - first.held[case]) for case in last.held)
    return StepPrediction(
        **seconds,
        peak=[(case.rows, last.peaks[case] + more * of_layers) for case, of_layers in held],
        optimizer_seconds=whole(first.optimizer_seconds, last.optimizer_seconds),
        state_bytes=_state_bytes(setup, setup.num_layers),
        waits_for_collator=not num_workers,
        timed_layers=depths,
        cpu_share=min(first.cpu_share, last.cpu_share),
    )


def free_bytes(device: torch.device) -> float:
    """Return the memory that a process can still get on a device. On the host it is read from /proc.

    On CUDA that includes what torch's allocator keeps of tensors that are gone, which the driver counts as used.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))  # of a container
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, float(int(limit.read_text()) - int(used.read_text())))
    return free


def _state_bytes(setup: RunSetup, num_layers: int) -> int:
    """Count bytes of weights, gradients and moments of the model with that many layers, without allocating it."""
    model = setup.build(num_layers, torch.device("meta"))
    return sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters()) + setup.moment_bytes(model)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Measurements on a model of fewer layers.

    seconds: of each case. peaks: bytes that some cases add to weights and gradients: the smallest of each arm, and the
    largest radix one. held: bytes of the radix ones that live from the forward pass to the backward pass.
    optimizer_seconds: of clipping and the optimizer's step.
    cpu_share: part of the time for which this thread had a core; 1 on a GPU, where it waits.
    """

    seconds: dict[Case, float]
    peaks: dict[Case, int]
    held: dict[Case, int]
    optimizer_seconds: float
    cpu_share: float


def time_cases(
    setup: RunSetup,
    num_layers: int,
    cases: Sequence[Case],
    max_seconds: float = math.inf,
    max_bytes: float = math.inf,
) -> Timings:
    """Time cases on a model of that many layers, as many as time and memory allow, and at least the smallest ones.

    cases: of each arm, from the smallest to the largest.
    max_seconds: for all of them. max_bytes: that a case may add to weights, gradients and optimizer.
    """
    model = setup.build(num_layers, setup.device)
    arms = _Arms(setup, model)
    try:
        with without_messages():
            peaks = {case: arms.peak(case) for case in _first_of_each_arm(cases)}  # warms up, too
            chosen = arms.affordable(cases, peaks, max_seconds, max_bytes)
            wall, cpu = time.perf_counter(), time.thread_time()
            seconds = arms.seconds(chosen)
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            optimizer_seconds = arms.optimizer_seconds()
            radix = [case for case in chosen if case.arm == "radix"]
            ends = dict.fromkeys((radix[0], radix[-1]))
            peaks |= {case: arms.peak(case) for case in ends if case not in peaks}
            held = {case: arms.held(case) for case in ends}
        cpu_share = cpu / wall if setup.device.type == "cpu" else 1.0
        return Timings(
            seconds=seconds, peaks=peaks, held=held, optimizer_seconds=optimizer_seconds, cpu_share=cpu_share
        )
    finally:
        restore_model(model)
        del model, arms
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def without_messages() -> AbstractContextManager[None]:
    """Silence the log lines of a model about its layers and, once it is shared, its first batches."""
    return logged_from(logging.WARNING, "radixtrain.hf")


def _first_of_each_arm(cases: Sequence[Case]) -> list[Case]:
    return [next(case for case in cases if case.arm == arm) for arm in ARMS]


class _Arms:
    """Runs cases on a model: on unique tokens by the shared model, on padded batches by Hugging Face's unchanged one.

    Both with the loss of `fit`, fused with the head if that is one matrix.
    """

    def __init__(self, setup: RunSetup, model: Any):
        self.setup, self.model, self.plain_head = setup, model, has_plain_head(model)
        self.optimizer = setup.optimizer(model)

    def enter(self, arm: ArmName) -> None:
        """Make the model ready for the batches of an arm."""
        if arm == "ordinary":
            restore_model(self.model)
        else:
            names = ("attention", "kernel", "allow_dropout")
            share_prefixes(self.model, **{name: getattr(self.setup, name) for name in names})

    def run(self, case: Case) -> None:
        """Run forward and backward. Gradients are added to those that are there."""
        self.loss(case).backward()

    def loss(self, case: Case) -> Tensor:
        batch = {name: x.to(self.setup.device) for name, x in case.batch.items()}
        with self.setup.forward():
            return forward_rows(self.model, batch, self.plain_head).loss_sum() / case.num_labels

    def peak(self, case: Case) -> int:
        """Count the bytes that the case adds to weights and gradients, which exist already, as in a second one."""
        self.enter(case.arm)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return peak_bytes(partial(self.run, case), self.setup.device)

    def held(self, case: Case) -> int:
        """Count those bytes that live after the forward pass."""
        self.enter(case.arm)
        return held_bytes(partial(self.loss, case), self.setup.device)

    def affordable(
        self, cases: Sequence[Case], peaks: Mapping[Case, int], max_seconds: float, max_bytes: float
    ) -> list[Case]:
        """Return the cases that time and memory allow, in their order; those with peaks, the smallest, in any case.

        The cost of a case is estimated from the cost per row of the smallest. Each may take half of the time left,
        the largest first, since a prediction is good near the sizes that were timed.
        """
        chosen, costs = {*peaks}, {}
        for case in peaks:
            self.enter(case.arm)
            seconds = seconds_of(partial(self.run, case), self.setup.device)
            costs[case.arm] = REPEATS * seconds / case.rows, peaks[case] / case.rows
        for case in sorted(cases, key=lambda case: -case.rows):
            seconds, size = (cost * case.rows for cost in costs[case.arm])
            if size <= max_bytes and seconds <= max_seconds / 2 and case not in chosen:
                chosen.add(case)
                max_seconds -= seconds
        return [case for case in cases if case in chosen]

    def seconds(self, cases: Sequence[Case]) -> dict[Case, float]:
        """Return the fastest run of each, alternating the arms. Each turn of an arm begins without gradients."""
        fastest = dict.fromkeys(cases, math.inf)
        for _ in range(REPEATS):
            for arm in ARMS:
                self.enter(arm)
                self.model.zero_grad(set_to_none=True)
                for case in (case for case in cases if case.arm == arm):
                    fastest[case] = min(fastest[case], self.timed(partial(self.run, case)))
        return fastest

    def timed(self, run: Callable[[], object]) -> float:
        """Time a run. On a CPU only the time counts for which this thread had a core: other programs take the rest."""
        if self.setup.device.type != "cpu":
            return seconds_of(run, self.setup.device)
        start = time.thread_time()
        run()
        return time.thread_time() - start

    def optimizer_seconds(self) -> float:
        """Time a step with the gradients that are there."""
        trained = [p for p in self.model.parameters() if p.grad is not None]

        def step() -> None:
            nn.utils.clip_grad_norm_(trained, self.setup.max_grad_norm or math.inf)
            self.optimizer.step()

        return min(self.timed(step) for _ in range(REPEATS))
