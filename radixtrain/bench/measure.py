"""One training step, ordinary and on unique tokens: is it the same, how long does it take, and how much memory?

Both arms run the same weights on the same sequences in one process, and take turns (A B A B ...), so that a machine
that slows down slows both. The ordinary arm is the best that a user has: Hugging Face's own attention on padded rows
(the sequences of a `Cell` are equally long, so there is no padding), the head on labelled tokens alone, and the same
fused loss. Batches lie on the device before the clock starts: plans are made in a trainer's DataLoader workers.

Work is measured only if both arms compute the same (`radixtrain/bench/check.py`). Untimed passes come first: that
check, then memory.

    model = build_model(shape, device, dtype, "sdpa")
    results = measure(model, make_work(Cell(shape, 512, 64, 16)), Settings())
    results = measure(model, work_of(Rows(shape, "my rows", len(features)), features), Settings())
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from radixtrain.bench.arms import run_step, seconds_in_turns, set_arm
from radixtrain.bench.cells import Cell, ModelShape, Rows, build_model
from radixtrain.bench.check import check_arms
from radixtrain.bench.memory import peak_bytes
from radixtrain.bench.work import Work, make_work, work_of
from radixtrain.hf.prepare import restore_model

__all__ = [
    "Cell",
    "Measured",
    "ModelShape",
    "Rows",
    "Settings",
    "Work",
    "build_model",
    "make_work",
    "measure",
    "work_of",
]


@dataclass(frozen=True)
class Settings:
    """How work is measured; see the command's keys of the same names."""

    attention: tuple[str, ...] = ("auto",)
    kernel: str = "auto"
    repeats: int = 5
    float64_truth: bool = False
    ordinary: bool = True


@dataclass(frozen=True)
class Measured:
    """One attention strategy on one piece of work, beside the ordinary arm. What needs an ordinary arm that was not
    timed is None.

    num_tokens, num_unique_tokens: T without padding, and U.
    ideal_speedup: the ratio of floating-point operations (`radixtrain.bench.flops`).
    ordinary_turns, radix_turns: seconds of each turn; turn i of both arms ran one after the other.
    *_peak_bytes: see `_peak`.
    error: the worst relative L2 distance of a gradient (or of the outputs) to what it was checked against.
    """

    cell: Cell | Rows
    attention: str
    num_tokens: int
    num_unique_tokens: int
    ideal_speedup: float
    ordinary_turns: tuple[float, ...]
    radix_turns: tuple[float, ...]
    ordinary_peak_bytes: int | None
    radix_peak_bytes: int
    error: float

    @property
    def r(self) -> float:
        """Tokens per unique token."""
        return self.num_tokens / self.num_unique_tokens

    @property
    def speedups(self) -> list[float]:
        """Ordinary seconds over radix seconds, of each turn."""
        pairs = zip(self.ordinary_turns, self.radix_turns, strict=True) if self.ordinary_turns else ()
        return [ordinary / radix for ordinary, radix in pairs]

    @property
    def measured_speedup(self) -> float | None:
        """The median turn's."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def lowest_speedup(self) -> float | None:
        """Far from the highest, the machine was busy with something else."""
        return min(self.speedups, default=None)

    @property
    def highest_speedup(self) -> float | None:
        return max(self.speedups, default=None)

    @property
    def efficiency(self) -> float | None:
        return None if self.measured_speedup is None else self.measured_speedup / self.ideal_speedup

    @property
    def ordinary_seconds(self) -> float | None:
        """Median."""
        return statistics.median(self.ordinary_turns) if self.ordinary_turns else None

    @property
    def radix_seconds(self) -> float:
        """Median."""
        return statistics.median(self.radix_turns)

    @property
    def lowest_radix_seconds(self) -> float:
        return min(self.radix_turns)

    @property
    def highest_radix_seconds(self) -> float:
        return max(self.radix_turns)

    @property
    def ordinary_tokens_per_second(self) -> float | None:
        return None if self.ordinary_seconds is None else self.num_tokens / self.ordinary_seconds

    @property
    def radix_tokens_per_second(self) -> float:
        """Effective: original tokens, not computed ones."""
        return self.num_tokens / self.radix_seconds

    @property
    def microseconds_per_unique_token(self) -> float:
        """Of the radix arm."""
        return 1e6 * self.radix_seconds / self.num_unique_tokens

    @property
    def memory_ratio(self) -> float | None:
        """Ordinary peak over radix peak: as a speed-up, the higher the better."""
        return None if self.ordinary_peak_bytes is None else self.ordinary_peak_bytes / self.radix_peak_bytes


def measure(model: PreTrainedModel, work: Work, settings: Settings) -> list[Measured]:
    """Check work, then measure it: one result for each of `settings.attention`. The model comes back restored.

    Raises UserError that names the parameter if an arm does not compute what the ordinary one does.
    """
    work = work.to(next(model.parameters()).device)
    arms: tuple[str | None, ...] = (None, *settings.attention) if settings.ordinary else settings.attention
    try:
        errors = check_arms(model, work, settings.attention, settings.kernel, settings.float64_truth)
        peaks = {arm: _peak(model, work, arm, settings.kernel) for arm in arms}
        turns = seconds_in_turns(model, {arm: (work, arm) for arm in arms}, settings.kernel, settings.repeats)
    finally:
        restore_model(model)
        model.zero_grad(set_to_none=True)
    return [
        Measured(
            cell=work.cell,
            attention=f"auto: {work.choices}" if attention == "auto" and work.auto else attention,
            num_tokens=work.num_tokens,
            num_unique_tokens=work.num_unique_tokens(attention),
            ideal_speedup=work.ideal_speedup(model.config),
            ordinary_turns=tuple(turns.get(None, ())),
            radix_turns=tuple(turns[attention]),
            ordinary_peak_bytes=peaks.get(None),
            radix_peak_bytes=peaks[attention],
            error=errors[attention],
        )
        for attention in settings.attention
    ]


def _peak(model: PreTrainedModel, work: Work, arm: str | None, kernel: str) -> int:
    """Most bytes that a step adds to what is there before it: weights, batch and, in a `step`, every gradient.

    The gradients are there as in the second micro-batch of an optimizer step, so what is counted is activations, the
    fused loss with its gradient of the head, and the one gradient at a time that is about to be added.
    """
    set_arm(model, arm, kernel)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if work.cell.mode == "step" else None
    return peak_bytes(lambda: run_step(model, work, arm), next(model.parameters()).device)
