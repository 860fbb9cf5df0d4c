"""Micro-batches of the user's own data, timed on a model of the same shape with fewer layers and random weights.

No weights are read. Both arms run in one process and take turns, so that a machine that slows down slows both. What is
timed is what `fit` does with a micro-batch, forward and backward, and with a step: clipping and the optimizer.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predictions import predict
from radixtrain.hf.prepare import prepare_model, restore_model
from radixtrain.report.cases import ARMS, Arm, Case, largest, smallest
from radixtrain.timing import peak_bytes

__all__ = ["Rehearsal", "Timed", "num_bytes", "rehearse"]

REPEATS = 3  # the median counts, so that the first one, which is slower, does not


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """How a run would train, without its weights.

    build: number of layers, device -> the model with random weights, in training mode and in the dtype of the run, with
        adapters if it has any, not prepared.
    optimizer: of such a model. forward: the context of a forward pass, autocast for instance.
    num_layers: of the whole model. period: layers after which their kinds repeat, 1 if all are alike.
    dtype: of the computation.
    row_seconds: what the matrices of a layer take for a row, forward and backward; None before `with_step_cost`.
    """

    build: Callable[[int, torch.device], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    forward: Callable[[], AbstractContextManager[Any]]
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    period: int = 1
    row_seconds: float | None = None
    attention: str = "auto"
    kernel: str = "auto"
    allow_dropout: tuple[str, ...] = ()
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What was measured on a model of so many layers.

    seconds: of each case. peaks: bytes that a case adds to weights and gradients at most, of some cases.
    optimizer_seconds: of clipping and the optimizer's step.
    """

    num_layers: int
    seconds: dict[Case, float]
    peaks: dict[Case, int]
    optimizer_seconds: float


def rehearse(
    rehearsal: Rehearsal,
    num_layers: int,
    cases: Sequence[Case],
    max_seconds: float = math.inf,
    max_bytes: float = math.inf,
) -> Timed:
    """Time cases on a model of so many layers, as many as time and memory allow, and the smallest ones in any case.

    cases: of both arms, from the smallest to the largest.
    max_seconds: for all of them. max_bytes: that a case may add to weights, gradients and optimizer.
    """
    with _quiet():
        return _rehearse(rehearsal, num_layers, cases, max_seconds, max_bytes)


def _rehearse(
    rehearsal: Rehearsal, num_layers: int, cases: Sequence[Case], max_seconds: float, max_bytes: float
) -> Timed:
    model = rehearsal.build(num_layers, rehearsal.device)
    stage = _Stage(rehearsal, model)
    try:
        began = time.perf_counter()
        peaks = stage.warm_up(cases)
        chosen = _affordable(stage, cases, peaks, max_seconds - (time.perf_counter() - began), max_bytes)
        seconds = stage.times(chosen)
        optimizer_seconds = stage.optimizer_seconds()
        peaks |= {case: stage.peak(case) for case in largest(chosen) if case not in peaks}
        return Timed(num_layers=num_layers, seconds=seconds, peaks=peaks, optimizer_seconds=optimizer_seconds)
    finally:
        restore_model(model)
        del model, stage
        gc.collect()
        if rehearsal.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, the log does not say what a prepared model would say of its first batches."""
    logger = logging.getLogger("radixtrain.hf")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Stage:
    """A model on which cases run."""

    def __init__(self, rehearsal: Rehearsal, model: Any):
        self.rehearsal, self.model = rehearsal, model
        self.plain_head = has_plain_head(model)
        self.optimizer = rehearsal.optimizer(model)

    def enter(self, arm: Arm) -> None:
        """Make the model ready for the batches of an arm."""
        if arm == "ordinary":
            restore_model(self.model)
            return
        options = self.rehearsal
        prepare_model(
            self.model, attention=options.attention, kernel=options.kernel, allow_dropout=options.allow_dropout
        )

    def run(self, case: Case) -> float:
        """Seconds of forward and backward. Gradients are added to those that are there."""
        device = self.rehearsal.device
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.batch.items()}
        _wait_for(device)
        start = time.perf_counter()
        self._step(batch, case.num_labels)
        _wait_for(device)
        return time.perf_counter() - start

    def _step(self, batch: dict[str, Any], num_labels: int) -> None:
        with self.rehearsal.forward():
            loss = predict(self.model, batch, self.plain_head).loss_sum() / num_labels
        loss.backward()

    def warm_up(self, cases: Sequence[Case]) -> dict[Case, int]:
        """Run the smallest case of each arm. Returns its peak."""
        return {case: self.peak(case) for case in smallest(cases)}

    def times(self, cases: Sequence[Case]) -> dict[Case, float]:
        """The median of some runs of each, the arms in turns."""
        seconds: dict[Case, list[float]] = {case: [] for case in cases}
        for _ in range(REPEATS):
            for arm in ARMS:
                self.enter(arm)
                self.model.zero_grad(set_to_none=True)
                for case in cases:
                    if case.arm == arm:
                        seconds[case].append(self.run(case))
        return {case: statistics.median(each) for case, each in seconds.items()}

    def optimizer_seconds(self) -> float:
        """Of a step with the gradients that are there."""
        trained = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.rehearsal.max_grad_norm or float("inf")
        seconds = []
        for _ in range(REPEATS):
            _wait_for(self.rehearsal.device)
            start = time.perf_counter()
            nn.utils.clip_grad_norm_(trained, limit)
            self.optimizer.step()
            _wait_for(self.rehearsal.device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def peak(self, case: Case) -> int:
        """Bytes that the case adds to weights, gradients and its batch."""
        self.enter(case.arm)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return peak_bytes(lambda: self.run(case), self.rehearsal.device)


def _affordable(
    stage: _Stage, cases: Sequence[Case], peaks: dict[Case, int], max_seconds: float, max_bytes: float
) -> list[Case]:
    """The cases that time and memory allow, from the smallest to the largest.

    peaks: of the smallest case of each arm. What a case takes is judged by what that one takes for each row. Each may
    take half of the time that is left, the largest first: a prediction is good near the sizes that were timed.
    """
    if math.isinf(max_seconds) and math.isinf(max_bytes):
        return list(cases)
    seconds, row_bytes = {}, {}
    for case, peak in peaks.items():
        stage.enter(case.arm)
        seconds[case.arm] = stage.run(case) / case.counts.rows
        row_bytes[case.arm] = peak / case.counts.rows
    chosen = [*peaks]
    for case in reversed(cases):
        needed = REPEATS * seconds[case.arm] * case.counts.rows
        fits = row_bytes[case.arm] * case.counts.rows <= max_bytes
        if fits and needed <= max_seconds / 2 and case not in chosen:
            chosen.append(case)
            max_seconds -= needed
    return [case for case in cases if case in chosen]


def num_bytes(parameters: Iterable[Tensor]) -> int:
    """Of all of them together."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
