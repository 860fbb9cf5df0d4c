"""What a step would take on this machine, predicted from micro-batches that were timed on fewer layers.

Two depths are timed, and every layer beyond takes as long as those between them: with 1 and 3 layers, the 28th costs
half of the difference. A model that is small enough is timed whole. To the seconds of the timed micro-batches, for each
arm,

    seconds = rows a + b + attention c + predictions d

is fitted (least squares of the relative errors, no rate below 0), which gives micro-batches of other sizes: other
settings. A step adds clipping, the optimizer, and what surrounds a step of `fit`. Peak memory is fitted in the same way
to the peaks, a and b only, and added to weights, gradients and the optimizer's two moments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from radixtrain.errors import UserError
from radixtrain.hf.calibration import non_negative_fit
from radixtrain.hf.step_cost import step_cost_of
from radixtrain.report.cases import Arm, Case
from radixtrain.report.counts import CountedStep, Counts
from radixtrain.report.profiling import REPEATS, Rehearsal, Timed, num_bytes, rehearse
from radixtrain.report.sharing import SampledSteps
from radixtrain.tree.cost_model import StepCost

__all__ = ["Prediction", "free_bytes", "predict_seconds", "with_step_cost"]

MAX_SECONDS = 50.0  # of all rehearsals
# Of a step of `fit`, between its optimizer steps: Lightning's loop and the log, on an x86-64 core.
STEP_SECONDS = 8e-3
DEEPER = 3  # times the layers of the shorter model
MOMENTS = 2  # of AdamW, for each trained parameter
SPARE = 0.5  # part of the free memory that a rehearsal may take


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds and bytes of steps on this machine.

    radix, ordinary: a, b, c and d of the formula above, of the whole model. peak: of a radix micro-batch, the same.
    optimizer_seconds: of a step. state_bytes: weights, gradients and moments.
    waits_for_collator: whether collating takes cores from the step.
    timed_layers: of the models that were timed.
    """

    radix: np.ndarray
    ordinary: np.ndarray
    peak: np.ndarray
    optimizer_seconds: float
    state_bytes: int
    waits_for_collator: bool
    timed_layers: tuple[int, ...]

    def radix_seconds(self, step: CountedStep) -> float:
        collating = step.collate_seconds if self.waits_for_collator else 0.0
        return _total(self.radix, step.radix) + self.optimizer_seconds + STEP_SECONDS + collating

    def ordinary_seconds(self, step: CountedStep) -> float:
        return _total(self.ordinary, step.ordinary) + self.optimizer_seconds + STEP_SECONDS

    def speedup(self, sampled: SampledSteps) -> float:
        """Of a step, ordinary over radix."""
        ordinary, radix = (sum(map(each, sampled.steps)) for each in (self.ordinary_seconds, self.radix_seconds))
        return ordinary / radix

    def seconds_per_epoch(self, sampled: SampledSteps) -> float:
        return sampled.scale * sum(map(self.radix_seconds, sampled.steps))

    def memory_bytes(self, sampled: SampledSteps) -> int:
        """Most bytes of a step, in the micro-batch that needs most."""
        peaks = (_total(self.peak, [counts]) for step in sampled.steps for counts in step.radix)
        return round(self.state_bytes + max(peaks))


def with_step_cost(rehearsal: Rehearsal) -> tuple[Rehearsal, StepCost | None]:
    """The rehearsal with what a layer's matrices take for a row here, and the cost that the collator chooses by.

    The cost is None for `attention: reference`, which nothing is known of. UserError if the device is neither a CPU nor
    CUDA, or its free memory does not hold the cut model.
    """
    _check_memory(rehearsal, rehearsal.period)
    attention = "auto" if rehearsal.attention == "reference" else rehearsal.attention
    model = rehearsal.build(rehearsal.period, rehearsal.device)
    cost = step_cost_of(model, attention)
    found = replace(rehearsal, row_seconds=cost.row_seconds)
    return found, None if rehearsal.attention == "reference" else cost


def predict_seconds(
    rehearsal: Rehearsal, cases: Sequence[Case], num_workers: int, max_seconds: float = MAX_SECONDS
) -> Prediction:
    """Time these micro-batches and fit.

    num_workers: processes that collate while a step runs.

    Takes about `max_seconds`, more if the smallest micro-batch of each arm takes that long. UserError if the memory
    that is free here does not hold the cut model.
    """
    depths = _depths(rehearsal, cases, max_seconds)
    max_bytes = _check_memory(rehearsal, depths[-1])
    last = rehearse(rehearsal, depths[-1], cases, max_seconds * depths[-1] / sum(depths), max_bytes)
    first = last if len(depths) == 1 else rehearse(rehearsal, depths[0], list(last.seconds))
    seconds, peaks = (
        {case: _whole(first, last, rehearsal.num_layers, (a[case], b[case])) for case in b}
        for a, b in ((first.seconds, last.seconds), (first.peaks, last.peaks))
    )
    return Prediction(
        radix=_fitted(seconds, "radix"),
        ordinary=_fitted(seconds, "ordinary"),
        peak=_fitted(peaks, "radix", 2),
        optimizer_seconds=_whole(first, last, rehearsal.num_layers, (first.optimizer_seconds, last.optimizer_seconds)),
        state_bytes=_state_bytes(rehearsal, rehearsal.num_layers),
        waits_for_collator=_shares_cores(rehearsal.device, num_workers),
        timed_layers=depths,
    )


def free_bytes(device: torch.device) -> float:
    """Memory that a process can still get on a device. On the host this is a reading of /proc, infinite without it.

    On CUDA that includes what torch's allocator keeps of tensors that are gone, which the driver counts as used.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return min(1024.0 * int(available.split()[1]), _container_bytes())


def _container_bytes() -> float:
    """What is left of the memory limit of the container; infinite without one."""
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
        return math.inf
    return float(int(limit.read_text()) - int(used.read_text()))


def _check_memory(rehearsal: Rehearsal, num_layers: int) -> float:
    """Bytes that are left to a rehearsal beside so many layers. UserError if those layers take too many."""
    free, needed = free_bytes(rehearsal.device), _state_bytes(rehearsal, num_layers)
    if needed > SPARE * free:
        raise UserError(
            f"{num_layers} of its {rehearsal.num_layers} layers with gradients and optimizer need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here"
        )
    return SPARE * free - needed


def _depths(rehearsal: Rehearsal, cases: Sequence[Case], max_seconds: float) -> tuple[int, ...]:
    """The layers of the models that are timed: of the whole one if that takes little, else of two short ones."""
    short = (rehearsal.period, DEEPER * rehearsal.period)
    if short[1] >= rehearsal.num_layers:
        return (rehearsal.num_layers,)
    fits = _state_bytes(rehearsal, rehearsal.num_layers) <= SPARE * free_bytes(rehearsal.device)
    largest = {case.arm: case.counts.rows for case in cases}  # cases come from the smallest to the largest
    assert rehearsal.row_seconds is not None
    seconds = REPEATS * rehearsal.num_layers * rehearsal.row_seconds * sum(largest.values())
    return (rehearsal.num_layers,) if fits and seconds <= max_seconds / 4 else short


def _state_bytes(rehearsal: Rehearsal, num_layers: int) -> int:
    """Weights, gradients and moments of the model with so many layers, which is not allocated."""
    parameters = list(rehearsal.build(num_layers, torch.device("meta")).parameters())
    weights, trained = num_bytes(parameters), num_bytes(p for p in parameters if p.requires_grad)
    return weights + (1 + MOMENTS) * trained


def _shares_cores(device: torch.device, num_workers: int) -> bool:
    """Whether the processes that collate take cores from the step, or the step waits for its own process."""
    busy = torch.get_num_threads() + num_workers if device.type == "cpu" else num_workers
    return num_workers == 0 or busy > (os.cpu_count() or 1)


def _whole(first: Timed, last: Timed, num_layers: int, measured: tuple[float, float]) -> float:
    """What the whole model takes if these were measured: every layer as much as those between the two depths."""
    low, high = measured
    between = last.num_layers - first.num_layers
    return high if not between else low + (num_layers - first.num_layers) * max(high - low, 0) / between


def _fitted(measured: Mapping[Case, float], arm: Arm, num_rates: int = 4) -> np.ndarray:
    """(4,). The rates of an arm, scaled so that they sum to what was measured.

    num_rates: the others are 0, and with fewer cases than rates the last ones are too.
    """
    cases = [case for case in measured if case.arm == arm]
    work, found = np.stack([_terms(case.counts) for case in cases]), np.array([measured[case] for case in cases])
    used = min(num_rates, len(cases))
    rates = np.zeros(work.shape[1])
    rates[:used] = non_negative_fit(work[:, :used], found)
    return rates * found.sum() / (work @ rates).sum()


def _terms(counts: Counts) -> np.ndarray:
    """What the rates are multiplied by, the most important first."""
    return np.array([counts.rows, 1.0, counts.attention, counts.predictions])


def _total(rates: np.ndarray, micro_batches: Iterable[Counts]) -> float:
    return float(sum(_terms(counts) @ rates for counts in micro_batches))
