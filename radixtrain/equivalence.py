"""Radix against ordinary Hugging Face on the same model and data: loss and every parameter's gradient.

Both arms are measured against the float64 truth of `radixtrain.oracle`, so the bar is not a tolerance that somebody
chose but what the ordinary arm's own rounding is. In float64, where rounding is all but gone, it is a number: 1e-12.
Loss closeness alone proves little (a wrong mask moved it by 0.07 % where it was measured), so gradients are compared,
per tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.collators.radix import RadixCollator
from radixtrain.model import prepare_model, prepared_options, pretrained_model_of, restore_model
from radixtrain.oracle import (
    Arm,
    Features,
    Gradients,
    float64_throughout,
    float64_truth,
    gradients_of,
    ordinary_padded,
    radix_batch,
    weights_in,
)

__all__ = ["EquivalenceReport", "Rung", "TensorError", "compare_gradients", "verify_arms", "verify_equivalence"]

FLOAT64_BAR = 1e-12  # relative L2 of a tensor; the worst of thousands of generated tries is below 1e-14
FLOAT64_FLOOR = 1e-15  # of the largest gradient: what float64 leaves of a tensor that is a thousandth of it or less
# How much more rounding error than the ordinary arm's, worst tensor against worst tensor, as flash-attn allows its
# gradients. Over many batches the two are alike (median ratio 1.0), but one batch has luck, and a tensor of few
# elements more of it: of 400 in float32 1 in 100 was above 2, `expand` as often as `cascade`, the worst a norm of 8
# elements at 2.9; a bias of 4 once came to 3.1. So n elements may have 1 + LUCK / n times as much.
ROUNDING_FACTOR, LUCK = 3.0, 8.0
# A gradient this much smaller than the largest is zero but for the truth's own rounding; below float64 it is drowned in
# the rounding of the others, in both arms, and judged in float64 alone.
DEAD, DROWNED = 1e-12, 1e-6


@dataclass(frozen=True)
class TensorError:
    """One parameter: L2 errors against the truth, relative to its norm, and the element where radix is furthest off.

    name: of the parameter.
    size: its elements.
    norm: L2 norm of the true gradient.
    ordinary, radix: relative errors of the two arms. In float64 the truth is the ordinary arm, whose error is 0.
    place: index of the worst element.
    values: its gradient by radix, by the ordinary arm and in truth.
    """

    name: str
    size: int
    norm: float
    ordinary: float
    radix: float
    place: tuple[int, ...] = ()
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rung:
    """The comparison in one precision."""

    precision: str
    truth_loss: float
    ordinary_loss: float
    radix_loss: float
    tensors: tuple[TensorError, ...]

    @cached_property
    def alive(self) -> tuple[TensorError, ...]:
        """Gradients that this precision can judge."""
        return tuple(tensor for tensor in self.tensors if tensor.norm > self._silence)

    @cached_property
    def dead(self) -> tuple[TensorError, ...]:
        """Gradients that are truly zero, or drowned: they prove nothing, and fail nothing.

        A fresh LoRA (B = 0) has A's dead.
        """
        return tuple(tensor for tensor in self.tensors if not tensor.norm > self._silence)

    def bar(self, tensor: TensorError) -> float:
        """The largest relative error that this tensor may have.

        In float64 1e-12, or what rounding leaves of a tensor much smaller than the largest. Below it three times the
        worst error of the ordinary arm, and more for few elements.
        """
        if self.precision == "float64":
            return FLOAT64_BAR + FLOAT64_FLOOR * self._largest / tensor.norm
        return ROUNDING_FACTOR * (1 + LUCK / tensor.size) * self.worst_ordinary

    @cached_property
    def failed(self) -> tuple[TensorError, ...]:
        """Gradients above their bar, the furthest first. NaN is above every bar."""
        above = [tensor for tensor in self.alive if not tensor.radix <= self.bar(tensor)]
        return tuple(sorted(above, key=lambda tensor: -_finite(tensor.radix)))

    @property
    def worst(self) -> TensorError:
        """The largest relative error of radix; of any tensor where all are dead."""
        return max(self.alive or self.tensors, key=lambda tensor: _finite(tensor.radix))

    @property
    def worst_ordinary(self) -> float:
        """The largest relative error of the ordinary arm."""
        return max((tensor.ordinary for tensor in self.alive), default=0.0)

    @property
    def median_radix(self) -> float:
        return statistics.median([_finite(tensor.radix) for tensor in self.alive] or [0.0])

    @property
    def median_ordinary(self) -> float:
        return statistics.median([_finite(tensor.ordinary) for tensor in self.alive] or [0.0])

    @property
    def loss_error(self) -> float:
        """Relative, of the loss by radix."""
        return abs(self.radix_loss - self.truth_loss) / max(abs(self.truth_loss), 1e-30)

    @property
    def loss_bar(self) -> float:
        """1e-12 in float64; below it what the ordinary arm's gradients are allowed: one scalar has too much luck."""
        return FLOAT64_BAR if self.precision == "float64" else ROUNDING_FACTOR * self.worst_ordinary

    @property
    def passed(self) -> bool:
        """The loss and every gradient that is alive are within their bars, and at least one is alive."""
        return bool(self.alive) and not self.failed and self.loss_error <= self.loss_bar

    @property
    def _largest(self) -> float:
        return max((tensor.norm for tensor in self.tensors), default=0.0)

    @property
    def _silence(self) -> float:
        return (DEAD if self.precision == "float64" else DROWNED) * self._largest


@dataclass(frozen=True)
class EquivalenceReport:
    """What `verify_equivalence` measured, one rung for each precision. `str()` is a table for people."""

    rungs: tuple[Rung, ...]

    @property
    def passed(self) -> bool:
        """Every rung passed."""
        return all(rung.passed for rung in self.rungs)

    @property
    def conclusive(self) -> bool:
        """No gradient is dead: what passed was all tested."""
        return not self.rungs[0].dead

    @property
    def reason(self) -> str:
        """Why it did not pass, in one line that names the parameter; empty where it did."""
        return next((_failure(rung) for rung in self.rungs if not rung.passed), "")

    def __getitem__(self, precision: str) -> Rung:
        return next(rung for rung in self.rungs if rung.precision == precision)

    def __str__(self) -> str:
        return "\n".join([*_summary(self.rungs), "", *_worst_tensors(self.rungs), *_verdict(self)])


def verify_equivalence(
    model: nn.Module,
    features: Features,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    collator: Callable[[Features], dict[str, Any]] | None = None,
    precisions: Sequence[str] | None = None,
) -> EquivalenceReport:
    """Compare the loss and the gradients of a radix batch with those of the ordinary model.

    model: a `PreTrainedModel` or PEFT model, prepared or not. Comes back as it was, without gradients. It computes in
        float64 for a while: 20 bytes a parameter are needed beside those it has, 16 of them for trained ones only.
    features: as a `RadixCollator` takes them; together they must bear loss.
    attention, kernel: as for `prepare_model`. A kernel that takes 16-bit tensors alone is asked of 16-bit rungs alone.
    collator: default `RadixCollator()`.
    precisions: of `float64`, `float32` and the model's own dtype; default all of them.

    Dropout that `prepare_model` was allowed is off meanwhile. Raises ValueError where nothing bears loss, UserError as
    `prepare_model` does.
    """
    batch = (collator or RadixCollator())(features)
    return verify_arms(
        model, features, lambda: ordinary_padded(model, features), lambda: radix_batch(model, batch),
        attention=attention, kernel=kernel, precisions=precisions,
    )  # fmt: skip


def verify_arms(
    model: nn.Module, features: Features, ordinary: Arm, radix: Arm, *, attention: str = "auto", kernel: str = "auto",
    precisions: Sequence[str] | None = None, autocast: torch.dtype | None = None,
) -> EquivalenceReport:  # fmt: skip
    """`verify_equivalence` for other ways to compute the two losses, such as a trainer's own.

    ordinary, radix: yield the terms of the loss; called with the model restored, and prepared.
    autocast: the dtype of mixed precision, which is then the last rung.
    """
    own = str(autocast or pretrained_model_of(model).dtype).removeprefix("torch.")
    wanted = tuple(precisions or dict.fromkeys(("float64", "float32", own)))
    before = prepared_options(model)
    allowed = before["allow_dropout"] if before else ()
    rungs = []
    with _as_it_was(model, before), _without_dropout(model, bool(allowed)):
        truth = float64_truth(restore_model(model), features)
        for precision in wanted:
            in_precision = _Precision(precision, autocast if precision == own else None)
            with in_precision.applied_to(restore_model(model)):
                plain = truth if precision == "float64" else gradients_of(model, ordinary)
                prepare_model(model, attention=attention, kernel=in_precision.kernel(kernel), allow_dropout=allowed)
                rungs.append(compare_gradients(precision, truth, plain, gradients_of(model, radix)))
    return EquivalenceReport(tuple(rungs))


def compare_gradients(precision: str, truth: Gradients, ordinary: Gradients, radix: Gradients) -> Rung:
    """A rung of the ladder. All three hold the same parameters; errors are computed in float64, one tensor at a time.

    In float64 `ordinary` is the truth itself.
    """
    tensors = tuple(
        _tensor_error(name, exact, ordinary.tensors[name], radix.tensors[name]) for name, exact in truth.tensors.items()
    )
    return Rung(precision, truth.loss, ordinary.loss, radix.loss, tensors)


@dataclass(frozen=True)
class _Precision:
    name: str
    autocast: torch.dtype | None

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Weights, casts and autocast of this rung. A model whose own dtype it is stays as it is."""
        device = next(model.parameters()).device.type
        with ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast(device, self.autocast))
            elif self.name == "float64":
                stack.enter_context(float64_throughout(model))
            elif getattr(torch, self.name) != pretrained_model_of(model).dtype:
                stack.enter_context(weights_in(model, getattr(torch, self.name)))
            yield

    def kernel(self, asked_for: str) -> str:
        """flash-attn knows 16 bits only; the wider rungs test the same tree on a kernel that can."""
        return "auto" if asked_for == "flash_attn" and self.name in ("float64", "float32") else asked_for


@contextmanager
def _as_it_was(model: nn.Module, before: Mapping[str, Any] | None) -> Iterator[None]:
    try:
        yield
    finally:
        restore_model(model)
        if before:
            prepare_model(model, **before)


@contextmanager
def _without_dropout(model: nn.Module, allowed: bool) -> Iterator[None]:
    """Two arms that draw differently cannot be compared."""
    training = model.training
    if allowed:
        model.eval()
    try:
        yield
    finally:
        model.train(training)


def _tensor_error(name: str, truth: Tensor, ordinary: Tensor, radix: Tensor) -> TensorError:
    exact = truth.double()
    norm = exact.norm().item()
    errors = [0.0 if x is truth else (x.double() - exact).norm().item() for x in (ordinary, radix)]
    off = (radix.double() - exact).abs().nan_to_num(nan=float("inf"))
    place = tuple(int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    values = radix[place].item(), ordinary[place].item(), exact[place].item()
    ordinary_error, radix_error = (_relative(error, norm) for error in errors)
    return TensorError(name, truth.numel(), norm, ordinary_error, radix_error, place, values)


def _relative(error: float, norm: float) -> float:
    return error / norm if norm else (0.0 if error == 0 else float("inf"))


def _finite(error: float) -> float:
    return error if error == error else float("inf")  # NaN is never the smaller one


def _summary(rungs: Sequence[Rung]) -> list[str]:
    lines = [
        f"{'':<34}   {'worst tensor':>17}   {'median tensor':>17}",
        f"{'precision':<10} {'loss':>11} {'by radix':>11}" + f"   {'radix':>8} {'ordinary':>8}" * 2,
    ]
    for rung in rungs:
        errors = [rung.worst.radix, rung.worst_ordinary, rung.median_radix, rung.median_ordinary]
        worst, worst_ordinary, median, median_ordinary = (f"{error:.1e}" if error else "truth" for error in errors)
        lines.append(
            f"{rung.precision:<10} {rung.ordinary_loss:>11.7f} {rung.radix_loss:>11.7f}   "
            f"{worst:>8} {worst_ordinary:>8}   {median:>8} {median_ordinary:>8}   "
            f"{'equal' if rung.passed else 'NOT EQUAL'}"
        )
    return lines


def _worst_tensors(rungs: Sequence[Rung], count: int = 5) -> list[str]:
    """The worst tensors of the first rung, by their error in every rung."""
    by_name = [{tensor.name: tensor for tensor in rung.tensors} for rung in rungs]
    alive = rungs[0].alive
    worst = sorted(alive, key=lambda tensor: -_finite(tensor.radix))[:count]
    lines = [
        f"relative L2 error of the gradient against the float64 truth, the worst {len(worst)} of {len(alive)} tensors:",
        "  " + "  ".join(f"{rung.precision:>9}" for rung in rungs),
    ]
    for tensor in worst:
        errors = "  ".join(f"{tensors[tensor.name].radix:>9.1e}" for tensors in by_name)
        lines.append(f"  {errors}  {tensor.name}")
    return lines


def _verdict(report: EquivalenceReport) -> list[str]:
    lines = []
    for rung in report.rungs:
        if not rung.passed:
            lines.append(_failure(rung))
    dead = report.rungs[0].dead
    if dead:
        named = ", ".join(tensor.name for tensor in dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
        lines.append(f"not tested: {named}: the true gradient is zero on this data, which proves nothing")
    return lines


def _failure(rung: Rung) -> str:
    if not rung.alive:
        return f"{rung.precision}: NOT EQUAL: no gradient is alive, so nothing was tested"
    if not rung.failed:
        return (
            f"{rung.precision}: NOT EQUAL: the loss is {rung.radix_loss:.9g} and in truth {rung.truth_loss:.9g}, "
            f"{rung.loss_error:.1e} apart; at most {rung.loss_bar:.1e} is rounding"
        )
    tensor = rung.failed[0]
    radix, ordinary, exact = tensor.values
    others = f" ({len(rung.failed) - 1} more tensors too)" if len(rung.failed) > 1 else ""
    return (
        f"{rung.precision}: NOT EQUAL: {tensor.name} is off by {tensor.radix:.1e}, at most {rung.bar(tensor):.1e} is "
        f"rounding{others}; worst element {list(tensor.place)}: radix {radix:.9g}, ordinary {ordinary:.9g}, truth "
        f"{exact:.9g}"
    )
