"""The verdict on a comparison of gradients, in words, and its table.

How large an error may be is in `radixtrain/verification/bars.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from radixtrain.verification.bars import (
    AGREEMENT,
    MEDIAN_FACTOR,
    TENSOR_FACTOR,
    Comparison,
    TensorError,
    nan_as_inf,
    relative,
)

__all__ = ["EquivalenceReport", "Rung"]


@dataclass(frozen=True)
class Rung(Comparison):
    """The comparison in one precision, and its verdict.

    judged: False for a mixture of experts in 16 bits. Rounding moves a token whose two best experts are nearly tied to
        the other one, in either arm, so single tensors say nothing. What is not finite still fails.
    """

    judged: bool = True

    @property
    def passed(self) -> bool:
        """The loss and every gradient are within their bars, and at least one gradient is alive."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it did not pass, in one line that names the parameter; empty if it did."""
        return next(self._reasons() if self.judged else self._reasons_if_not_judged(), "")

    def _reasons_if_not_judged(self) -> Iterator[str]:
        sound = isfinite(self.radix_loss) and isfinite(self.worst.radix) and self.median_ratio <= TENSOR_FACTOR
        if not sound:
            yield self._say_failed(self.worst)

    def _reasons(self) -> Iterator[str]:
        if not self.alive:
            yield "no gradient is alive, so nothing was tested"
        if self.disagreeing:
            yield self._say_disagreeing(self.disagreeing)
        if self.failed:
            yield self._say_failed(self.failed[0])
        if not self.loss_error <= self.loss_bar:
            yield (
                f"the loss is {self.radix_loss:.9g} and in truth {self.truth_loss:.9g}, {self.loss_error:.1e} apart; "
                f"at most {self.loss_bar:.1e} is rounding"
            )
        if not self.median_ratio <= MEDIAN_FACTOR:
            yield (
                f"the gradients are {self.median_ratio:.1f} times as far from the truth as the ordinary ones, in the "
                f"median tensor; at most {MEDIAN_FACTOR:.0f} times is luck"
            )

    def _say_failed(self, tensor: TensorError) -> str:
        radix, ordinary, exact = tensor.values
        others = f" ({len(self.failed) - 1} more tensors too)" if len(self.failed) > 1 else ""
        if self.is_dead(tensor):
            what, off, most = "should be zero and is off by", tensor.radix_difference, self.allowed(tensor)
        else:
            what, off, most = "is off by", tensor.radix, relative(self.allowed(tensor), tensor.norm)
        return (
            f"{tensor.name} {what} {off:.1e}, at most {most:.1e} is rounding{others}; worst element "
            f"{list(tensor.place)}: radix {radix:.9g}, ordinary {ordinary:.9g}, truth {exact:.9g}"
        )

    def _say_disagreeing(self, tensors: tuple[TensorError, ...]) -> str:
        worst = max(tensors, key=lambda tensor: nan_as_inf(tensor.ordinary))
        if self.ordinary_loss_error <= AGREEMENT:
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


@dataclass(frozen=True)
class EquivalenceReport:
    """What `verify_equivalence` measured, one rung for each precision. `str()` is a table to read."""

    rungs: tuple[Rung, ...]

    @property
    def passed(self) -> bool:
        """Every rung passed."""
        return all(rung.passed for rung in self.rungs)

    @property
    def conclusive(self) -> bool:
        """No gradient is dead, so every one was tested."""
        return not self.rungs[0].dead

    @property
    def reason(self) -> str:
        """Why it did not pass, in one line that names the parameter; empty if it did."""
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
        verdict = "not judged" if not rung.judged and rung.passed else "equal" if rung.passed else "NOT EQUAL"
        lines.append(
            f"{rung.precision:<10} {rung.ordinary_loss:>11.7f} {rung.radix_loss:>11.7f}   "
            f"{worst:>8} {worst_ordinary:>8}   {median:>8} {median_ordinary:>8}   {verdict}"
        )
    return lines


def _worst_tensors(rungs: Sequence[Rung], count: int = 5) -> list[str]:
    """The tensors nearest to their bar, or furthest above it, in any rung; their error in every rung."""
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
    """Below the table: what failed, what was not judged, what proves little."""
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
