"""Predicts the time and memory of a step on this machine from micro-batches timed on fewer layers.

Two depths are timed, and every further layer is taken to cost as much as those between them: with 1 and 3 layers, the
28th costs half of the difference. To the seconds of the timed micro-batches, for each arm,

    seconds = rows a + b + attention c + predictions d

is fitted (least squares of the relative errors, no rate below 0), which gives micro-batches of other sizes: other
settings. A step adds clipping, the optimizer, and the overhead of a step of `fit`.

Peak memory is that of the deeper model plus, for every further layer, what lives after its forward pass. The peaks do
not give the slope: in a model of few layers, the gradient of the embeddings may exceed all activations. It is fitted in
the same way, a and b only, and added to weights, gradients, the optimizer's moments and, on a CPU, what the
process of `fit` holds before it has a model, and what its allocator keeps.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from radixtrain.errors import UserError
from radixtrain.report.profiling import ArmName, Case, RunSetup, Timings, time_cases
from radixtrain.report.sharing import CountedStep, Counts, SampledSteps
from radixtrain.timing import non_negative_fit

# Time that `fit` spends between two optimizer steps: Lightning's loop and the log, on an x86-64 core.
STEP_SECONDS = 8e-3
# What `fit` imports and starts before its first step, and `report` does not: Lightning, the DataLoader.
TRAINER_BYTES = 110 << 20
# Resident bytes per byte that a step holds besides its state, since glibc leaves holes in freed memory. Chosen from six
# runs of fit with 28M and 135M weights on x86-64, which had 1.1 to 2.2 from the second step on. Two others took 0.79 (a
# wide model) and 1.24 (LoRA) of the prediction.
MALLOC = 1.35
DEEPER = 3  # times the layers of the shorter model
SPARE = 0.5  # part of the free memory that the timed model may take


class Process(NamedTuple):
    """The memory of a process.

    base_bytes: what it holds besides the model and its steps. malloc: resident bytes per byte that a step holds.
    """

    base_bytes: int
    malloc: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds and bytes of steps on this machine.

    radix, ordinary: a, b, c and d of the formula above, of the whole model. peak: of a radix micro-batch, likewise.
    optimizer_seconds: of a step. state_bytes: weights, gradients and moments. process: that of `fit`.
    waits_for_collator: whether collating takes cores from the step.
    timed_layers: of the models that were timed. cpu_share: see `Timings`.
    """

    radix: np.ndarray
    ordinary: np.ndarray
    peak: np.ndarray
    optimizer_seconds: float
    state_bytes: int
    process: Process
    waits_for_collator: bool
    timed_layers: tuple[int, ...]
    cpu_share: float

    def radix_seconds(self, step: CountedStep) -> float:
        collating = step.collate_seconds if self.waits_for_collator else 0.0
        return _total(self.radix, step.radix) + self.optimizer_seconds + STEP_SECONDS + collating

    def ordinary_seconds(self, micro_batches: Iterable[Counts]) -> float:
        return _total(self.ordinary, micro_batches) + self.optimizer_seconds + STEP_SECONDS

    def speedups(self, sampled: SampledSteps) -> tuple[float, float]:
        """Divide ordinary by radix seconds of a step: of the same rows, and of whole chats."""
        radix = sum(map(self.radix_seconds, sampled.steps))
        rows, whole = (
            sum(map(self.ordinary_seconds, steps))
            for steps in ([step.ordinary for step in sampled.steps], [step.whole for step in sampled.steps])
        )
        return rows / radix, whole / radix

    def seconds_per_epoch(self, sampled: SampledSteps) -> float:
        return sampled.scale * sum(map(self.radix_seconds, sampled.steps))

    def memory_bytes(self, sampled: SampledSteps) -> int:
        """Predict the peak bytes of a step: those of the micro-batch that needs most."""
        num_rows = max(counts.rows for step in sampled.steps for counts in step.radix)
        activations = self.peak[0] * num_rows + self.peak[1]
        return round(self.process.base_bytes + self.state_bytes + self.process.malloc * activations)


def predict_seconds(
    setup: RunSetup, cases: Sequence[Case], num_workers: int, max_seconds: float, process: Process
) -> Prediction:
    """Time these micro-batches and fit the rates.

    num_workers: processes that collate while a step runs. process: that of `fit`.

    Takes about `max_seconds`, more if the smallest micro-batch of each arm takes that long. Raises UserError if
    the free memory does not hold the cut model.
    """
    depths = (setup.period, DEEPER * setup.period) if DEEPER * setup.period < setup.num_layers else (setup.num_layers,)
    max_bytes = _free_beside(setup, depths[-1])
    last = time_cases(setup, depths[-1], cases, max_seconds * depths[-1] / sum(depths), max_bytes)
    first = last if len(depths) == 1 else time_cases(setup, depths[0], list(last.seconds))
    whole = partial(_whole, setup.num_layers, first, last)
    seconds = {case: whole(first.seconds[case], last.seconds[case]) for case in last.seconds}
    peaks = {case: last.peaks[case] + _extra_bytes(setup.num_layers, first, last, case) for case in last.peaks}
    return Prediction(
        radix=_fitted(seconds, "radix"),
        ordinary=_fitted(seconds, "ordinary"),
        peak=_fitted(peaks, "radix", 2),
        optimizer_seconds=whole(first.optimizer_seconds, last.optimizer_seconds),
        state_bytes=_state_bytes(setup, setup.num_layers),
        process=process,
        waits_for_collator=_shares_cores(setup.device, num_workers),
        timed_layers=depths,
        cpu_share=min(first.cpu_share, last.cpu_share),
    )


def free_bytes(device: torch.device) -> float:
    """Return the memory that a process can still get on a device. On the host it is read from /proc; infinite without.

    On CUDA that includes what torch's allocator keeps of tensors that are gone, which the driver counts as used.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return min(1024.0 * int(available.split()[1]), _container_bytes())


def _container_bytes() -> float:
    """Return the free part of the container's memory limit; infinite without one."""
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
        return math.inf
    return float(int(limit.read_text()) - int(used.read_text()))


def process_of_fit(device: torch.device) -> Process:
    """Return what `fit` would hold on the device, by what this process holds. Call it before a model is built.

    On CUDA it holds nothing, since only what torch allocates is predicted there.
    """
    if device.type == "cuda":
        return Process(0, 1.0)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return Process(TRAINER_BYTES + int(statm.read_text().split()[1]) * resource.getpagesize(), MALLOC)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Process(TRAINER_BYTES + most * (1 if sys.platform == "darwin" else 1024), MALLOC)


def _free_beside(setup: RunSetup, num_layers: int) -> float:
    """Return the bytes left for micro-batches after that many layers. Raises UserError if the layers take too many."""
    free, needed = free_bytes(setup.device), _state_bytes(setup, num_layers)
    if needed > SPARE * free:
        raise UserError(
            f"{num_layers} of its {setup.num_layers} layers with gradients and optimizer need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here"
        )
    return SPARE * free - needed


def _state_bytes(setup: RunSetup, num_layers: int) -> int:
    """Count bytes of weights, gradients and moments of the model with that many layers, without allocating it."""
    model = setup.build(num_layers, torch.device("meta"))
    return sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters()) + setup.moment_bytes(model)


def _shares_cores(device: torch.device, num_workers: int) -> bool:
    """Return whether collating takes cores from the step, or the step waits for its own process."""
    busy = torch.get_num_threads() + num_workers if device.type == "cpu" else num_workers
    return num_workers == 0 or busy > (os.cpu_count() or 1)


def _whole(num_layers: int, first: Timings, last: Timings, low: float, high: float) -> float:
    """Extrapolate from two depths to the whole model: every layer takes as much as those between them."""
    between = last.num_layers - first.num_layers
    return high if not between else low + (num_layers - first.num_layers) * max(high - low, 0) / between


def _extra_bytes(num_layers: int, first: Timings, last: Timings, case: Case) -> float:
    """Extrapolate the bytes of the layers that the deeper model lacks: each holds as much as those in between."""
    between = last.num_layers - first.num_layers
    return (num_layers - last.num_layers) * (last.held[case] - first.held[case]) / between if between else 0.0


def _fitted(measured: Mapping[Case, float], arm: ArmName, num_rates: int = 4) -> np.ndarray:
    """Fit the rates of an arm, (4,), scaled so that they sum to what was measured.

    num_rates: rates to fit; the others are 0, and with fewer cases than rates the last ones are too.
    """
    cases = [case for case in measured if case.arm == arm]
    work, values = np.stack([_terms(case.counts) for case in cases]), np.array([measured[case] for case in cases])
    used = min(num_rates, len(cases))
    rates = np.zeros(work.shape[1])
    rates[:used] = non_negative_fit(work[:, :used], values)
    return rates * values.sum() / (work @ rates).sum()


def _terms(counts: Counts) -> np.ndarray:
    """Return the counts that the rates multiply, the most important first."""
    return np.array([counts.rows, 1.0, counts.attention, counts.predictions])


def _total(rates: np.ndarray, micro_batches: Iterable[Counts]) -> float:
    return float(sum(_terms(counts) @ rates for counts in micro_batches))
