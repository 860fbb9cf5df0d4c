"""How far the gradients of both arms are from the truth, how far rounding may move them, and the verdict in words.

In float64, which hardly rounds, the bar is a number: 1e-12. In lower precision it follows from the rounding of the
ordinary arm, measured on the same weights and sequences.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

FLOAT64_BAR = 1e-12  # relative L2 of a tensor; the worst of 1,500 generated tries was 1.2e-14
FLOAT64_FLOOR = 1e-15  # of the largest gradient: the rounding of tensors whose norm is a thousandth of it or less
# An ill-conditioned gradient has more rounding in float64 too. The ordinary arm's error is a sample of it, of which
# CONDITION times as much is allowed. Above AGREEMENT two ordinary ways to compute the gradient do not agree, and there
# is no verdict.
CONDITION, AGREEMENT = 100.0, 1e-9
# Below float64. Over many batches both arms have the same error, but a single batch has luck, most of all in a tensor
# of few elements: of 400 batches of a tiny model 1 in 20 had a tensor above twice its ordinary error, `expand` as often
# as `cascade`. So one comparison bounds the median of the ratios by 2 and a single tensor by 10. The test suite, over
# all its tries, is stricter: tests/claims/equivalence/test_rounding.py.
MEDIAN_FACTOR, TENSOR_FACTOR = 2.0, 10.0
# Shares of the largest gradient. In float64 a gradient below DEAD is zero except for the truth's own rounding. In lower
# precision one below DROWNED is smaller than the rounding of the others, in both arms.
DEAD, DROWNED = 1e-12, 1e-6


@dataclass(frozen=True)
class TensorError:
    """One gradient, or the loss: how far both arms are from the truth, and the element where radix is furthest off.

    name: of the parameter.
    norm: L2 norm in truth.
    ordinary_difference, radix_difference: L2 norms of the differences from it; infinite if an element is not a number.
    place: index of the worst element.
    values: its value by radix, by the ordinary arm and in truth.
    """

    name: str
    norm: float
    ordinary_difference: float
    radix_difference: float
    place: tuple[int, ...] = ()
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def ordinary(self) -> float:
        """Return the relative error of the ordinary arm."""
        return _relative(self.ordinary_difference, self.norm)

    @property
    def radix(self) -> float:
        """Return the relative error of radix."""
        return _relative(self.radix_difference, self.norm)


@dataclass(frozen=True)
class Rung:
    """Loss and gradients of both arms against the truth in one precision, and the verdict.

    judged: False for a mixture of experts in 16 bits. Rounding moves a token whose two best experts are nearly tied to
        the other one, in either arm, so single tensors say nothing. What is not finite still fails, and so do gradients
        whose median error is `TENSOR_FACTOR` times the ordinary one.
    """

    precision: str
    loss: TensorError
    tensors: tuple[TensorError, ...]
    judged: bool = True

    @property
    def passed(self) -> bool:
        """Return whether the loss and every gradient are within their bars, and at least one gradient is alive."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Say why it did not pass, in one line that names the parameter; empty if it did."""
        if not self.alive:
            return "no gradient is alive, so nothing was tested"
        if self.disagreeing:
            worst = max(self.disagreeing, key=lambda tensor: tensor.ordinary)
            _, padded, single = self.loss.values
            return (
                f"no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on "
                f"its own, disagree by {worst.ordinary:.1e} in {worst.name}; their losses are {padded:.9g} and "
                f"{single:.9g}. The gradient may be too ill-conditioned for float64, or the model computes something "
                f"else for a sequence next to padding or other sequences, or the padded batch does not have the "
                f"model's own loss"
            )
        if self.failed:
            return self._say_failed(self.failed[0])
        if not self.median_ratio <= (luck := MEDIAN_FACTOR if self.judged else TENSOR_FACTOR):
            return (
                f"the gradients are {self.median_ratio:.1f} times as far from the truth as the ordinary ones, in the "
                f"median tensor; up to {luck:.0f} times may be luck"
            )
        return ""

    def _say_failed(self, tensor: TensorError) -> str:
        radix, ordinary, exact = tensor.values
        others = f" ({len(self.failed) - 1} more tensors too)" if len(self.failed) > 1 else ""
        if self.is_dead(tensor):
            what, off, most = "should be zero and is off by", tensor.radix_difference, self.allowed(tensor)
        else:
            what, off, most = "is off by", tensor.radix, _relative(self.allowed(tensor), tensor.norm)
        return (
            f"{tensor.name} {what} {off:.1e}, at most {most:.1e} is rounding{others}; worst element "
            f"{list(tensor.place)}: radix {radix:.9g}, ordinary {ordinary:.9g}, truth {exact:.9g}"
        )

    @cached_property
    def alive(self) -> tuple[TensorError, ...]:
        """Return the gradients that can be compared in this precision."""
        return tuple(tensor for tensor in self.tensors if not self.is_dead(tensor))

    @cached_property
    def dead(self) -> tuple[TensorError, ...]:
        """Return the gradients that are truly zero, or drowned in rounding. They only show that radix's are no larger.

        In a fresh LoRA (B = 0) the gradients of A are dead.
        """
        return tuple(tensor for tensor in self.tensors if self.is_dead(tensor))

    def is_dead(self, tensor: TensorError) -> bool:
        return tensor.norm <= self._dead_norm  # written so that a NaN in the truth is alive, and fails

    def allowed(self, tensor: TensorError) -> float:
        """Return the largest L2 difference from the truth that radix may have in this tensor. It is finite."""
        if self.precision == "float64":
            exact = FLOAT64_BAR * tensor.norm + FLOAT64_FLOOR * self._largest
            most = max(exact, min(CONDITION * tensor.ordinary_difference, AGREEMENT * tensor.norm))
        else:
            typical = self._dead_norm if self.is_dead(tensor) else self.upper_quartile_ordinary * tensor.norm
            most = TENSOR_FACTOR * max(tensor.ordinary_difference, typical)
        return min(most if self.judged else inf, sys.float_info.max)

    def share(self, tensor: TensorError) -> float:
        """Return the difference of radix as a share of what is allowed; above 1 the tensor failed."""
        return _relative(tensor.radix_difference, self.allowed(tensor))

    @cached_property
    def failed(self) -> tuple[TensorError, ...]:
        """Return what is further from the truth than allowed, or not finite, the furthest first."""
        compared = (self.loss, *self.tensors)
        above = [tensor for tensor in compared if not tensor.radix_difference <= self.allowed(tensor)]
        return tuple(sorted(above, key=lambda tensor: -self.share(tensor)))

    @property
    def disagreeing(self) -> tuple[TensorError, ...]:
        """Name gradients, in float64, on which two ordinary ways disagree: a padded batch and single sequences."""
        if self.precision != "float64":
            return ()
        floor = FLOAT64_FLOOR * self._largest
        return tuple(t for t in self.alive if not t.ordinary_difference <= AGREEMENT * t.norm + floor)

    @property
    def worst(self) -> TensorError:
        """Return the tensor with the largest relative error of radix among those alive; among all if none is alive."""
        return max(self.alive or self.tensors, key=lambda tensor: tensor.radix)

    @property
    def worst_ordinary(self) -> float:
        """Return the largest relative error of the ordinary arm."""
        return self._errors("ordinary")[-1]

    @cached_property
    def upper_quartile_ordinary(self) -> float:
        """Return the relative error that a quarter of the ordinary arm's tensors exceed."""
        errors = self._errors("ordinary")
        return errors[3 * (len(errors) - 1) // 4]

    @property
    def median_radix(self) -> float:
        return statistics.median(self._errors("radix"))

    @property
    def median_ordinary(self) -> float:
        return statistics.median(self._errors("ordinary"))

    def _errors(self, arm: str) -> list[float]:
        """List relative errors of an arm in the gradients that are alive, the smallest first; a zero if none is."""
        return sorted(getattr(tensor, arm) for tensor in self.alive) or [0.0]

    @property
    def median_ratio(self) -> float:
        """Return radix's error over the ordinary arm's, the median over the tensors alive; 1 in float64."""
        ratios = [_relative(tensor.radix_difference, tensor.ordinary_difference) for tensor in self.alive]
        return statistics.median(ratios) if ratios and self.precision != "float64" else 1.0

    @property
    def _largest(self) -> float:
        return max((tensor.norm for tensor in self.tensors), default=0.0)

    @property
    def _dead_norm(self) -> float:
        return (DEAD if self.precision == "float64" else DROWNED) * self._largest


@dataclass(frozen=True)
class EquivalenceReport:
    """What `verify_equivalence` measured. `str()` is a table to read.

    rungs: one for each precision: the losses, the errors of every gradient in both arms, and the verdict.
    """

    rungs: tuple[Rung, ...]

    @property
    def passed(self) -> bool:
        """Return whether every rung passed."""
        return all(rung.passed for rung in self.rungs)

    @property
    def conclusive(self) -> bool:
        """Return whether no gradient is dead, so that every one was tested."""
        return not self.rungs[0].dead

    @property
    def reason(self) -> str:
        """Say why it did not pass, in one line that names the parameter; empty if it did."""
        return next(iter(_failures(self.rungs)), "")

    def __getitem__(self, precision: str) -> Rung:
        return next(rung for rung in self.rungs if rung.precision == precision)

    def __str__(self) -> str:
        return "\n".join([*_summary(self.rungs), "", *_worst_tensors(self.rungs), *_verdict(self.rungs)])


def _summary(rungs: Sequence[Rung]) -> list[str]:
    lines = [
        f"{'':<34}   {'worst tensor':>17}   {'median tensor':>17}",
        f"{'precision':<10} {'loss':>11} {'by radix':>11}" + f"   {'radix':>8} {'ordinary':>8}" * 2,
    ]
    for rung in rungs:
        errors = [rung.worst.radix, rung.worst_ordinary, rung.median_radix, rung.median_ordinary]
        worst, worst_ordinary, median, median_ordinary = map("{:.1e}".format, errors)
        radix, ordinary, _ = rung.loss.values
        verdict = "not judged" if not rung.judged and rung.passed else "equal" if rung.passed else "NOT EQUAL"
        lines.append(
            f"{rung.precision:<10} {ordinary:>11.7f} {radix:>11.7f}   "
            f"{worst:>8} {worst_ordinary:>8}   {median:>8} {median_ordinary:>8}   {verdict}"
        )
    return lines


def _worst_tensors(rungs: Sequence[Rung], count: int = 5) -> list[str]:
    """List the tensors nearest to their bar, or furthest above it, in any rung, with their error in every rung."""
    by_name = [{tensor.name: tensor for tensor in rung.tensors} for rung in rungs]
    shares = {name: max(rung.share(of[name]) for rung, of in zip(rungs, by_name, strict=True)) for name in by_name[0]}
    worst = sorted(shares, key=lambda name: -shares[name])[:count]
    lines = [
        f"relative L2 error of the gradient against the float64 truth, {len(worst)} of {len(shares)} tensors, those "
        f"nearest their bar:",
        "  " + "  ".join(f"{rung.precision:>9}" for rung in rungs),
    ]
    for name in worst:
        errors = "  ".join(f"{tensors[name].radix:>9.1e}" for tensors in by_name)
        lines.append(f"  {errors}  {name}")
    return lines


def _verdict(rungs: Sequence[Rung]) -> list[str]:
    """Write the lines below the table: what failed, what was not judged, what proves little."""
    lines = _failures(rungs)
    lines += [
        f"{rung.precision}: not judged: rounding to 16 bits moves tokens between experts, with radixtrain and without"
        for rung in rungs
        if not rung.judged and rung.passed
    ]
    dead = [tensor.name for tensor in rungs[0].dead]
    if dead:
        named = ", ".join(dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
        lines.append(f"zero: {named}: the true gradient is zero on this data, and by radix too, which proves little")
    return lines


def _failures(rungs: Sequence[Rung]) -> list[str]:
    return [f"{rung.precision}: NOT EQUAL: {rung.reason}" for rung in rungs if not rung.passed]


def _relative(error: float, norm: float) -> float:
    """Divide; 0 / 0 is 0, and what is no number is infinite: `max` and `sorted` could overlook a NaN."""
    return error / norm if norm > 0 else (0.0 if error == 0 else inf)
