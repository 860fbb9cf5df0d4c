"""Measures a training step, ordinary and on unique tokens: whether both agree, their time and their memory.

Both arms run the same weights on the same sequences in one process, and take turns (A B A B ...), so that a machine
that slows down slows both. The ordinary arm is the best that a user has: Hugging Face's own attention on padded batches
(the sequences of a `Cell` are equally long, so there is no padding), the head only on tokens that predict, and the same
loss. Batches are on the device before the clock starts, because a trainer makes plans in its DataLoader workers.

    model = build_model(shape, device, dtype, "sdpa")
    results = measure(model, make_work(Cell(shape, 512, 64, 16)), Settings())
    results = measure(model, work_of(GivenBatch(shape, "my data", len(features)), features), Settings())

Before anything is timed, both arms must compute the same loss and gradient of every parameter, also if only the
forward pass is timed.

- float32: against the ordinary arm, at most `DIRECT_BAR` apart in relative L2;
- bfloat16: both arms against the ordinary model on the same weights in float32, one sequence at a time;
- `float64_truth`, and for a model with recurrent layers: both arms against the same in float64. The gradient of a decay
  is a sum of terms that cancel, so two float32 runs are 1e-4 apart in it.

The last two have the bars of `radixtrain verify`, which follow from the rounding of the ordinary arm.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from radixtrain.bench.cells import Cell, GivenBatch
from radixtrain.bench.work import Arm, Work, step_seconds
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.modules import mixers_of
from radixtrain.hf.prepare import restore_model
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_throughout, gradients_of, ordinary_one_by_one, weights_in
from radixtrain.verification.report import EquivalenceReport, Rung

# Float32 against float32, between rounding and a mistake: two orders of summation are 1e-6 apart, which varies with the
# processor, and a missing branch label 1e-2.
DIRECT_BAR = 1e-4


@dataclass(frozen=True)
class Settings:
    """How work is measured; see the command's keys of the same names."""

    attention: tuple[str, ...] = ("auto",)
    kernel: str = "auto"
    repeats: int = 5
    float64_truth: bool = False


@dataclass(frozen=True)
class Measured:
    """The results of an attention strategy on one piece of work, next to the ordinary arm.

    num_tokens, num_unique_tokens: T without padding, and U.
    least_unique_tokens: U if the step were not cut into micro-batches; None if it is one.
    ideal_speedup: the ratio of floating-point operations (`radixtrain/bench/flops.py`).
    ordinary_turns, radix_turns: seconds of each turn; turn i of both arms ran consecutively.
    *_peak_bytes: see `added_bytes`.
    error: the worst relative L2 distance of a gradient from its reference.
    """

    cell: Cell | GivenBatch
    attention: str
    num_tokens: int
    num_unique_tokens: int
    least_unique_tokens: int | None
    ideal_speedup: float
    ordinary_turns: tuple[float, ...]
    radix_turns: tuple[float, ...]
    ordinary_peak_bytes: int
    radix_peak_bytes: int
    error: float

    @property
    def r(self) -> float:
        """Return tokens per unique token."""
        return self.num_tokens / self.num_unique_tokens

    @property
    def best_r(self) -> float | None:
        """Return r without the cut into micro-batches; None if the step is not cut."""
        return None if self.least_unique_tokens is None else self.num_tokens / self.least_unique_tokens

    @property
    def speedups(self) -> list[float]:
        """Return ordinary seconds over radix seconds, of each turn. If they differ much, the machine was busy."""
        return [ordinary / radix for ordinary, radix in zip(self.ordinary_turns, self.radix_turns, strict=True)]

    @property
    def measured_speedup(self) -> float:
        """Return the speed-up of the median turn."""
        return statistics.median(self.speedups)

    @property
    def lowest_speedup(self) -> float:
        return min(self.speedups)

    @property
    def highest_speedup(self) -> float:
        return max(self.speedups)

    @property
    def efficiency(self) -> float:
        """Return the measured share of the ideal speed-up."""
        return self.measured_speedup / self.ideal_speedup

    @property
    def ordinary_seconds(self) -> float:
        return statistics.median(self.ordinary_turns)

    @property
    def radix_seconds(self) -> float:
        return statistics.median(self.radix_turns)

    @property
    def ordinary_tokens_per_second(self) -> float:
        return self.num_tokens / self.ordinary_seconds

    @property
    def radix_tokens_per_second(self) -> float:
        """Return original tokens per second, not computed ones."""
        return self.num_tokens / self.radix_seconds

    @property
    def microseconds_per_unique_token(self) -> float:
        """Return the microseconds of the radix arm for each unique token."""
        return 1e6 * self.radix_seconds / self.num_unique_tokens

    @property
    def memory_ratio(self) -> float:
        """Return ordinary peak over radix peak; like a speed-up, the higher the better."""
        return self.ordinary_peak_bytes / self.radix_peak_bytes


def measure(model: PreTrainedModel, work: Work, settings: Settings) -> list[Measured]:
    """Check work, then measure it: one result for each of `settings.attention`. Restores the model.

    Raises UserError that names the parameter if an arm does not compute the ordinary gradient.
    """
    work = work.to(next(model.parameters()).device)
    plain_head = has_plain_head(model)
    ordinary = Arm(plain_head=plain_head)
    radix = [Arm(attention=name, kernel=settings.kernel, plain_head=plain_head) for name in settings.attention]
    timed = [ordinary, *radix]
    try:
        errors = _check(model, work, ordinary, radix, settings.float64_truth)
        peaks = {arm: arm.peak(model, work) for arm in timed}
        turns = step_seconds(model, {arm: (arm, work) for arm in timed}, settings.repeats)
    finally:
        restore_model(model)
        model.zero_grad(set_to_none=True)
    return [
        Measured(
            cell=work.cell,
            attention=str(arm),
            num_tokens=work.num_tokens,
            num_unique_tokens=work.num_unique_tokens,
            least_unique_tokens=work.least_unique_tokens,
            ideal_speedup=work.ideal_speedup(model.config),
            ordinary_turns=tuple(turns[ordinary]),
            radix_turns=tuple(turns[arm]),
            ordinary_peak_bytes=peaks[ordinary],
            radix_peak_bytes=peaks[arm],
            error=errors[arm],
        )
        for arm in radix
    ]


def _check(
    model: PreTrainedModel, work: Work, ordinary: Arm, radix: Sequence[Arm], float64_truth: bool
) -> dict[Arm, float]:
    """Return the worst error of each radix arm. Raises UserError that names the parameter if one is too large."""
    expected = _answer(model, work, ordinary)
    truth = _truth(model, work, ordinary, float64_truth or bool(mixers_of(model))) or expected
    errors = {}
    for arm in radix:
        answer = _answer(model, work, arm)
        precision = str(model.dtype).removeprefix("torch.")
        rung = compare_gradients(precision, truth, expected, answer)
        reason = _difference(rung) if truth is expected else EquivalenceReport((rung,)).reason
        if reason:
            raise UserError(f"{work.cell}, {arm}: {reason}. Its times would compare different things")
        errors[arm] = rung.worst.radix
    return errors


def _difference(rung: Rung) -> str:
    """Say why two float32 runs differ, with the name of the tensor; empty if they agree."""
    worst = rung.worst
    if not worst.radix <= DIRECT_BAR:
        radix, ordinary, _ = worst.values
        return (
            f"{rung.precision}: NOT EQUAL: {worst.name} is {worst.radix:.1e} from the ordinary arm's, at most "
            f"{DIRECT_BAR:.0e} is rounding; worst element {list(worst.place)}: radix {radix:.9g}, ordinary "
            f"{ordinary:.9g}"
        )
    if not rung.loss_error <= DIRECT_BAR:
        return (
            f"{rung.precision}: NOT EQUAL: the loss is {rung.radix_loss:.9g}, the ordinary arm's {rung.truth_loss:.9g}"
        )
    return ""


def _truth(model: PreTrainedModel, work: Work, ordinary: Arm, in_float64: bool) -> Gradients | None:
    """Return the answer of the ordinary model in a wider dtype; None for a float32 model without `in_float64`."""
    if not in_float64 and model.dtype == torch.float32:
        return None
    ordinary.prepare(model)
    with float64_throughout(model) if in_float64 else weights_in(model, torch.float32):
        return _on_host(gradients_of(model, lambda: ordinary_one_by_one(model, work.features)))


def _answer(model: PreTrainedModel, work: Work, arm: Arm) -> Gradients:
    """Return loss and gradients of an arm, on the host, which has room for two more copies."""
    arm.prepare(model)
    return _on_host(gradients_of(model, lambda: arm.loss_terms(model, work)))


def _on_host(answer: Gradients) -> Gradients:
    return Gradients(answer.loss, {name: tensor.cpu() for name, tensor in answer.tensors.items()})
