"""What a comparison of gradients measured, the bars that it is held to, and its table for people.

In float64, where rounding is all but gone, the bar is a number: 1e-12. In lower precision it is what the ordinary arm's
own rounding is, measured on the same weights and rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

__all__ = ["EquivalenceReport", "Rung", "TensorError"]

FLOAT64_BAR = 1e-12  # relative L2 of a tensor; the worst of 1,500 generated tries came to 1.2e-14
FLOAT64_FLOOR = 1e-15  # of the largest gradient: what float64 leaves of a tensor that is a thousandth of it or less
# An ill-conditioned gradient has more rounding in float64 too, of which the ordinary arm's is a sample; at most 1e-9,
# beyond which two ordinary ways to compute it do not agree, and nothing can be said.
CONDITION, AGREEMENT = 100.0, 1e-9
# Below float64. Over many batches the arms are alike, but one batch has luck, and a tensor of few elements the most:
# of 400 batches of a tiny model 1 in 20 had a tensor above twice its ordinary error, `expand` as often as `cascade`. So
# one comparison bounds the median of the ratios by 2 and a single tensor by 10. The suite, over all its tries, is
# stricter: tests/claims/equivalence/test_rounding.py.
MEDIAN_FACTOR, TENSOR_FACTOR = 2.0, 10.0
LOSS_FLOOR = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}  # a few roundings: one scalar may be right by luck
# A gradient this much smaller than the largest is zero but for the truth's own rounding; below float64 it is drowned in
# the rounding of the others, in both arms.
DEAD, DROWNED = 1e-12, 1e-6


@dataclass(frozen=True)
class TensorError:
    """One parameter: how far both arms are from the truth, and the element where radix is furthest off.

    name: of the parameter.
    norm: L2 norm of the true gradient.
    ordinary_difference, radix_difference: L2 norms of the differences to it.
    place: index of the worst element.
    values: its gradient by radix, by the ordinary arm and in truth.
    """

    name: str
    norm: float
    ordinary_difference: float
    radix_difference: float
    place: tuple[int, ...] = ()
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def ordinary(self) -> float:
        """Relative error of the ordinary arm."""
        return _relative(self.ordinary_difference, self.norm)

    @property
    def radix(self) -> float:
        """Relative error of radix."""
        return _relative(self.radix_difference, self.norm)


@dataclass(frozen=True)
class Rung:
    """The comparison in one precision.

    judged: False for a mixture of experts in 16 bits. A token whose two best experts are nearly tied goes to another
        one by rounding alone, in either arm, so that single tensors say nothing; what is not finite still fails.
    """

    precision: str
    truth_loss: float
    ordinary_loss: float
    radix_loss: float
    tensors: tuple[TensorError, ...]
    judged: bool = True

    @cached_property
    def alive(self) -> tuple[TensorError, ...]:
        """Gradients that this precision can judge."""
        return tuple(tensor for tensor in self.tensors if tensor.norm > self._silence)

    @cached_property
    def dead(self) -> tuple[TensorError, ...]:
        """Gradients that are truly zero, or drowned: that radix has them so too is all they prove.

        A fresh LoRA (B = 0) has A's dead.
        """
        return tuple(tensor for tensor in self.tensors if not tensor.norm > self._silence)

    def allowed(self, tensor: TensorError) -> float:
        """The largest L2 difference to the truth that radix may have in this tensor."""
        if self.precision == "float64":
            exact = FLOAT64_BAR * tensor.norm + FLOAT64_FLOOR * self._largest
            return max(exact, min(CONDITION * tensor.ordinary_difference, AGREEMENT * tensor.norm))
        typical = self.upper_quartile_ordinary * tensor.norm
        if tensor.norm <= self._silence:
            typical = self._silence
        return TENSOR_FACTOR * max(tensor.ordinary_difference, typical)

    def share(self, tensor: TensorError) -> float:
        """Of what is allowed; above 1 it failed."""
        return _relative(_finite(tensor.radix_difference), self.allowed(tensor))

    @cached_property
    def failed(self) -> tuple[TensorError, ...]:
        """Gradients further from the truth than they may be, the furthest first. NaN is further than anything."""
        above = [tensor for tensor in self.tensors if not tensor.radix_difference <= self.allowed(tensor)]
        return tuple(sorted(above, key=lambda tensor: -_finite(self.share(tensor))))

    @property
    def disagreeing(self) -> tuple[TensorError, ...]:
        """In float64: gradients that two ordinary ways of computing them, padded and alone, do not agree on."""
        if self.precision != "float64":
            return ()
        floor = FLOAT64_FLOOR * self._largest
        return tuple(t for t in self.alive if not t.ordinary_difference <= AGREEMENT * t.norm + floor)

    @property
    def worst(self) -> TensorError:
        """The largest relative error of radix; of any tensor where all are dead."""
        return max(self.alive or self.tensors, key=lambda tensor: _finite(tensor.radix))

    @property
    def worst_ordinary(self) -> float:
        """The largest relative error of the ordinary arm."""
        return max((_finite(tensor.ordinary) for tensor in self.alive), default=0.0)

    @cached_property
    def upper_quartile_ordinary(self) -> float:
        """A quarter of the ordinary arm's tensors are further from the truth."""
        errors = sorted(_finite(tensor.ordinary) for tensor in self.alive)
        return errors[3 * (len(errors) - 1) // 4] if errors else 0.0

    @property
    def median_radix(self) -> float:
        return statistics.median([_finite(tensor.radix) for tensor in self.alive] or [0.0])

    @property
    def median_ordinary(self) -> float:
        return statistics.median([_finite(tensor.ordinary) for tensor in self.alive] or [0.0])

    @property
    def median_ratio(self) -> float:
        """Of the two arms' errors, over the tensors that are alive; 1 where the ordinary arm is the truth."""
        ratios = [_relative(_finite(t.radix_difference), t.ordinary_difference) for t in self.alive]
        return statistics.median(ratios) if ratios and self.precision != "float64" else 1.0

    @property
    def loss_error(self) -> float:
        """Relative, of the loss by radix."""
        return _relative(abs(self.radix_loss - self.truth_loss), abs(self.truth_loss))

    @property
    def loss_bar(self) -> float:
        """The largest relative error that the loss by radix may have."""
        ordinary = _relative(abs(self.ordinary_loss - self.truth_loss), abs(self.truth_loss))
        if self.precision == "float64":
            return max(FLOAT64_BAR, min(CONDITION * ordinary, AGREEMENT))
        return 3 * max(ordinary, LOSS_FLOOR[self.precision] / 3)

    @property
    def reason(self) -> str:
        """Why it did not pass, in one line that names the parameter; empty where it did."""
        return next(iter(self._reasons()), "")

    @property
    def passed(self) -> bool:
        """The loss and every gradient within their bars, and at least one gradient is alive."""
        return not self.reason

    def _reasons(self) -> list[str]:
        if not self.judged:
            sound = isfinite(self.radix_loss) and isfinite(self.worst.radix) and self.median_ratio <= TENSOR_FACTOR
            return [] if sound else [self._say_failed(self.worst)]
        reasons = []
        if not self.alive:
            reasons.append("no gradient is alive, so nothing was tested")
        reasons += [self._say_disagreeing(self.disagreeing)] if self.disagreeing else []
        reasons += [self._say_failed(self.failed[0])] if self.failed else []
        if not self.loss_error <= self.loss_bar:
            reasons.append(
                f"the loss is {self.radix_loss:.9g} and in truth {self.truth_loss:.9g}, {self.loss_error:.1e} apart; "
                f"at most {self.loss_bar:.1e} is rounding"
            )
        if not self.median_ratio <= MEDIAN_FACTOR:
            reasons.append(
                f"the gradients are {self.median_ratio:.1f} times as far from the truth as the ordinary ones, in the "
                f"median tensor; at most {MEDIAN_FACTOR:.0f} times is luck"
            )
        return reasons

    def _say_failed(self, tensor: TensorError) -> str:
        radix, ordinary, exact = tensor.values
        others = f" ({len(self.failed) - 1} more tensors too)" if len(self.failed) > 1 else ""
        off, most = (_relative(x, tensor.norm) for x in (tensor.radix_difference, self.allowed(tensor)))
        if tensor.norm <= self._silence:
            off, most = tensor.radix_difference, self.allowed(tensor)
        what = "should be zero and is off by" if tensor.norm <= self._silence else "is off by"
        return (
            f"{tensor.name} {what} {off:.1e}, at most {most:.1e} is rounding{others}; worst element "
            f"{list(tensor.place)}: radix {radix:.9g}, ordinary {ordinary:.9g}, truth {exact:.9g}"
        )

    def _say_disagreeing(self, tensors: tuple[TensorError, ...]) -> str:
        worst = max(tensors, key=lambda tensor: _finite(tensor.ordinary))
        if _relative(abs(self.ordinary_loss - self.truth_loss), abs(self.truth_loss)) <= AGREEMENT:
            meaning = f"Their losses agree ({self.truth_loss:.9g}): the gradient may be too ill-conditioned for float64"
        else:
            meaning = (
                f"So do their losses, {self.ordinary_loss:.9g} and {self.truth_loss:.9g}: either the model computes "
                f"something else for a sequence that has padding or other sequences beside it, or the padded batch "
                f"does not have the model's own loss"
            )
        return (
            f"no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on its "
            f"own, disagree by {worst.ordinary:.1e} in {worst.name}. {meaning}"
        )

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
        return next((f"{rung.precision}: NOT EQUAL: {rung.reason}" for rung in self.rungs if not rung.passed), "")

    def __getitem__(self, precision: str) -> Rung:
        return next(rung for rung in self.rungs if rung.precision == precision)

    def __str__(self) -> str:
        return "\n".join([*_summary(self.rungs), "", *_worst_tensors(self.rungs), *_verdict(self)])


def _relative(error: float, norm: float) -> float:
    return error / norm if norm else (0.0 if error == 0 else inf)


def _finite(error: float) -> float:
    return error if error == error else inf  # NaN is never the smaller one


def _summary(rungs: Sequence[Rung]) -> list[str]:
    lines = [
        f"{'':<34}   {'worst tensor':>17}   {'median tensor':>17}",
        f"{'precision':<10} {'loss':>11} {'by radix':>11}" + f"   {'radix':>8} {'ordinary':>8}" * 2,
    ]
    for rung in rungs:
        errors = [rung.worst.radix, rung.worst_ordinary, rung.median_radix, rung.median_ordinary]
        worst, worst_ordinary, median, median_ordinary = map("{:.1e}".format, errors)
        verdict = "not judged" if not rung.judged and rung.passed else "equal" if rung.passed else "NOT EQUAL"
        lines.append(
            f"{rung.precision:<10} {rung.ordinary_loss:>11.7f} {rung.radix_loss:>11.7f}   "
            f"{worst:>8} {worst_ordinary:>8}   {median:>8} {median_ordinary:>8}   {verdict}"
        )
    return lines


def _worst_tensors(rungs: Sequence[Rung], count: int = 5) -> list[str]:
    """The tensors nearest to what they may be, or furthest above it, in any rung; their error in every rung."""
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


def _verdict(report: EquivalenceReport) -> list[str]:
    lines = [f"{rung.precision}: NOT EQUAL: {rung.reason}" for rung in report.rungs if not rung.passed]
    lines += [
        f"{rung.precision}: not judged: rounding to 16 bits moves tokens between experts, with radixtrain and without"
        for rung in report.rungs
        if not rung.judged and rung.passed
    ]
    dead = [tensor.name for tensor in report.rungs[0].dead]
    if dead:
        named = ", ".join(dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
        lines.append(f"zero: {named}: the true gradient is zero on this data, and by radix too, which proves little")
    return lines
