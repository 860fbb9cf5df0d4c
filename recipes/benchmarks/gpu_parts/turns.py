"""Some arms on one step, in turns: seconds, peak memory and loss of each, within a time, in what memory holds.

If memory does not hold a step, it is several micro-batches, as few as fit, cut for each arm on its own.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gpu_parts.arms import as_loaded
from gpu_parts.run import Run, wait_for
from torch import Tensor

from radixtrain.bench.arms import Arm, OrdinaryArm, RadixArm
from radixtrain.bench.cells import Cell, GivenBatch
from radixtrain.bench.work import Work, work_of
from radixtrain.timing import peak_bytes

__all__ = ["Turns", "fitting_work", "take_turns"]

CPU_BYTES = 2**30
Features = Sequence[Mapping[str, Any]]


@dataclass
class Turns:
    """Of one arm. seconds: of each turn. peak_bytes: beyond the weights: gradients and activations."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = math.nan

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def take_turns(
    run: Run, model: Any, runs: Mapping[str, tuple[Arm, Work]], seconds: float, most: int
) -> dict[str, Turns]:
    """A B A B ..., at least one turn and at most so many, while another fits into the seconds.

    Each arm runs its first micro-batch untimed before. One that raises there is left out, unless memory is full.
    """
    deadline = time.perf_counter() + seconds
    turns = {name: Turns() for name in runs if _runs(run, model, name, *runs[name])}
    turn = 0.0
    for number in range(most):
        if number and time.perf_counter() + turn > deadline:
            break
        start = time.perf_counter()
        for name, of_arm in turns.items():
            _take_turn(run, model, *runs[name], of_arm)
        turn = time.perf_counter() - start
    as_loaded(model).zero_grad(set_to_none=True)
    return turns


def _runs(run: Run, model: Any, name: str, arm: Arm, work: Work) -> bool:
    first = replace(work, ordinary=work.ordinary[:1], radix=work.radix[:1])
    try:
        _take_turn(run, model, arm, first, Turns())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an arm that does not run leaves the others
        run.leave_out(f"{work.cell}, {name}", error)
        return False
    return True


def _take_turn(run: Run, model: Any, arm: Arm, work: Work, turns: Turns) -> None:
    arm.prepare(as_loaded(model))
    model.zero_grad(set_to_none=True)
    losses = []

    def one_pass() -> None:
        wait_for(run.device)
        start = time.perf_counter()
        losses.append(_pass(model, arm, work))
        wait_for(run.device)
        turns.seconds.append(time.perf_counter() - start)

    turns.peak_bytes = max(turns.peak_bytes, peak_bytes(one_pass, run.device))
    turns.loss = float(losses[0])


def _pass(model: Any, arm: Arm, work: Work) -> Tensor:
    """What is timed: every micro-batch forward and, in a step, backward. Returns the loss, on the device."""
    is_step, loss = work.cell.mode == "step", torch.zeros((), device=model.device)
    with nullcontext() if is_step else torch.no_grad():
        for term in arm.loss_terms(model, work):
            if is_step:
                term.backward()
            loss += term.detach()
    return loss


def fitting_work(
    run: Run,
    model: Any,
    cell: Cell | GivenBatch,
    features: Features,
    memory_share: float,
    ordinary: OrdinaryArm,
    radix: RadixArm,
    most_padded: int | None = None,
) -> Work:
    """The step, cut into as few micro-batches as memory holds, for each arm on its own.

    Each runs the longest sequence first, which shows how many bytes a token needs.

    memory_share: of the free memory, for the activations of a micro-batch; the rest is for fragments.
    most_padded: sequences of an ordinary micro-batch, at most; with unequal lengths fewer have less padding.
    """
    longest = max(features, key=lambda feature: len(feature["input_ids"]))
    length = len(longest["input_ids"])
    one = work_of(replace(cell, num_sequences=1), [longest]).to(run.device)
    most = []
    for arm in (ordinary, radix):
        peak = _peak(run, model, one, arm)  # leaves gradients, so that what is free after it is free for activations
        most.append(int(memory_share * _free_bytes(run) * length / peak))
    size = min(max(1, most[0] // length), most_padded or len(features))
    batch_size = math.ceil(len(features) / math.ceil(len(features) / size))
    return work_of(cell, features, batch_size, max(length, most[1]))


def _free_bytes(run: Run) -> int:
    """Of the device; on CPU what a laptop can spare."""
    if run.device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(run.device)[0]


def _peak(run: Run, model: Any, work: Work, arm: Arm) -> int:
    """Bytes beyond weights, batch and, in a step, gradients, which the first of two passes leaves."""
    arm.prepare(as_loaded(model))
    arm.run_step(model, work)
    return max(1, peak_bytes(lambda: arm.run_step(model, work), run.device))


def against(ordinary: Turns, radix: Turns) -> float:
    """The speed-up of the median turn."""
    return float(np.median([one / other for one, other in zip(ordinary.seconds, radix.seconds, strict=True)]))
