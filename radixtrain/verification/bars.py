"""How far the gradients of both arms are from the truth, and how far rounding may take them.

In float64, which hardly rounds, the bar is a number: 1e-12. In lower precision it follows from the rounding of the
ordinary arm, measured on the same weights and sequences.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from math import inf

__all__ = ["AGREEMENT", "MEDIAN_FACTOR", "TENSOR_FACTOR", "Comparison", "TensorError", "nan_as_inf", "relative"]

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
LOSS_FLOOR = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}  # a few roundings: one scalar may be right by luck
# Shares of the largest gradient. In float64 a gradient below DEAD is zero except for the truth's own rounding. In lower
# precision one below DROWNED is smaller than the rounding of the others, in both arms.
DEAD, DROWNED = 1e-12, 1e-6


@dataclass(frozen=True)
class TensorError:
    """One parameter: how far both arms are from the truth, and the element where radix is furthest off.

    name: of the parameter.
    norm: L2 norm of the true gradient.
    ordinary_difference, radix_difference: L2 norms of the differences from it.
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
        return relative(self.ordinary_difference, self.norm)

    @property
    def radix(self) -> float:
        """Relative error of radix."""
        return relative(self.radix_difference, self.norm)


@dataclass(frozen=True)
class Comparison:
    """Loss and gradients of both arms against the truth, in one precision."""

    precision: str
    truth_loss: float
    ordinary_loss: float
    radix_loss: float
    tensors: tuple[TensorError, ...]

    @cached_property
    def alive(self) -> tuple[TensorError, ...]:
        """Gradients that can be compared in this precision."""
        return tuple(tensor for tensor in self.tensors if not self.is_dead(tensor))

    @cached_property
    def dead(self) -> tuple[TensorError, ...]:
        """Gradients that are truly zero, or drowned in rounding. All they prove is that radix has no more than that.

        In a fresh LoRA (B = 0) the gradients of A are dead.
        """
        return tuple(tensor for tensor in self.tensors if self.is_dead(tensor))

    def is_dead(self, tensor: TensorError) -> bool:
        return tensor.norm <= self._dead_norm  # written so that a NaN in the truth is alive, and fails

    def allowed(self, tensor: TensorError) -> float:
        """The largest L2 difference from the truth that radix may have in this tensor."""
        if self.precision == "float64":
            exact = FLOAT64_BAR * tensor.norm + FLOAT64_FLOOR * self._largest
            return max(exact, min(CONDITION * tensor.ordinary_difference, AGREEMENT * tensor.norm))
        typical = self._dead_norm if self.is_dead(tensor) else self.upper_quartile_ordinary * tensor.norm
        return TENSOR_FACTOR * max(tensor.ordinary_difference, typical)

    def share(self, tensor: TensorError) -> float:
        """The difference of radix as a share of what is allowed; above 1 the tensor failed."""
        return relative(nan_as_inf(tensor.radix_difference), self.allowed(tensor))

    @cached_property
    def failed(self) -> tuple[TensorError, ...]:
        """Gradients further from the truth than they may be, the furthest first; NaN is further than any number."""
        above = [tensor for tensor in self.tensors if not tensor.radix_difference <= self.allowed(tensor)]
        return tuple(sorted(above, key=lambda tensor: -nan_as_inf(self.share(tensor))))

    @property
    def disagreeing(self) -> tuple[TensorError, ...]:
        """In float64: gradients on which two ordinary ways disagree, in a padded batch and one sequence at a time."""
        if self.precision != "float64":
            return ()
        floor = FLOAT64_FLOOR * self._largest
        return tuple(t for t in self.alive if not t.ordinary_difference <= AGREEMENT * t.norm + floor)

    @property
    def worst(self) -> TensorError:
        """The tensor with the largest relative error of radix, of those alive; of all tensors if none is alive."""
        return max(self.alive or self.tensors, key=lambda tensor: nan_as_inf(tensor.radix))

    @property
    def worst_ordinary(self) -> float:
        """The largest relative error of the ordinary arm."""
        return max((nan_as_inf(tensor.ordinary) for tensor in self.alive), default=0.0)

    @cached_property
    def upper_quartile_ordinary(self) -> float:
        """A quarter of the ordinary arm's tensors have a larger relative error."""
        errors = sorted(nan_as_inf(tensor.ordinary) for tensor in self.alive)
        return errors[3 * (len(errors) - 1) // 4] if errors else 0.0

    @property
    def median_radix(self) -> float:
        return statistics.median([nan_as_inf(tensor.radix) for tensor in self.alive] or [0.0])

    @property
    def median_ordinary(self) -> float:
        return statistics.median([nan_as_inf(tensor.ordinary) for tensor in self.alive] or [0.0])

    @property
    def median_ratio(self) -> float:
        """Radix's error over the ordinary arm's, the median of the tensors that are alive; 1 in float64."""
        ratios = [relative(nan_as_inf(t.radix_difference), t.ordinary_difference) for t in self.alive]
        return statistics.median(ratios) if ratios and self.precision != "float64" else 1.0

    @property
    def loss_error(self) -> float:
        """Relative error of the loss by radix."""
        return relative(abs(self.radix_loss - self.truth_loss), abs(self.truth_loss))

    @property
    def ordinary_loss_error(self) -> float:
        """Relative error of the ordinary arm's loss."""
        return relative(abs(self.ordinary_loss - self.truth_loss), abs(self.truth_loss))

    @property
    def loss_bar(self) -> float:
        """The largest relative error that the loss by radix may have."""
        if self.precision == "float64":
            return max(FLOAT64_BAR, min(CONDITION * self.ordinary_loss_error, AGREEMENT))
        return 3 * max(self.ordinary_loss_error, LOSS_FLOOR[self.precision] / 3)

    @property
    def _largest(self) -> float:
        return max((tensor.norm for tensor in self.tensors), default=0.0)

    @property
    def _dead_norm(self) -> float:
        return (DEAD if self.precision == "float64" else DROWNED) * self._largest


def relative(error: float, norm: float) -> float:
    return error / norm if norm else (0.0 if error == 0 else inf)


def nan_as_inf(error: float) -> float:
    """Every comparison with NaN is false, so `max` and `sorted` could overlook one."""
    return error if error == error else inf
