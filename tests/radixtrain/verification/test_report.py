"""How large an error may be: what passes, what just does not; the verdict in words, and the table."""

from collections.abc import Sequence
from functools import partial
from math import inf, isfinite

import pytest
import torch

from radixtrain.verification.equivalence import (
    EquivalenceReport,
    Rung,
    TensorError,
    compare_gradients,
    verify_equivalence,
)
from radixtrain.verification.oracle import Gradients
from tests.support.batches import FEATURES
from tests.support.models import tiny_qwen3

Errors = tuple[float, ...]
HONEST = dict.fromkeys("uvwx", (1.0, 1e-6, 1e-6))
ONE = {"one": (1.0, 0.0, 0.0)}


def rung(precision: str = "float32", loss: float = 1.0, judged: bool = True, **errors: Errors) -> Rung:
    """A rung of parameters given as name=(norm, ordinary difference, radix difference)."""
    tensors = tuple(TensorError(name, *numbers) for name, numbers in errors.items())
    off = abs(loss - 1) if isfinite(loss) else inf
    return Rung(precision, TensorError("the loss", 1.0, 0.0, off, (), (loss, 1.0, 1.0)), tensors, judged)


# Precision, other tensors, norm and ordinary error of one more, and the largest error that it may have.
LARGEST: dict[str, tuple[str, dict[str, Errors], float, float, float]] = {
    "exact": ("float64", {}, 1.0, 1e-15, 1e-12),
    "beside a large one": ("float64", ONE, 1e-4, 0.0, 1e-16 + 1e-15),
    "ill-conditioned": ("float64", {}, 1.0, 2e-13, 2e-11),
    "small and ill-conditioned": ("float64", ONE, 1e-3, 1e-13, 1e-12),
    "zero": ("float64", ONE, 0.0, 0.0, 1e-15),
    "rounding": ("float32", HONEST, 1.0, 1e-6, 1e-5),
    "where the ordinary one has luck": ("float32", HONEST, 1.0, 1e-8, 1e-5),
    "beside one without luck": ("float32", {**HONEST, "y": (1.0, 0.9, 1e-6)}, 1.0, 1e-6, 1e-5),
    "drowned": ("float32", HONEST, 1e-7, 1e-7, 1e-5),
    "the median": ("float32", {}, 1.0, 1e-6, 2e-6),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_error_that_passes(name: str) -> None:
    precision, others, norm, ordinary, most = LARGEST[name]
    for part, passed in ((0.95, True), (1.05, False)):
        made = rung(precision, **others, last=(norm, ordinary, part * most))
        assert made.passed is passed and bool(made.reason) is not passed


def test_the_largest_error_of_the_loss_that_passes() -> None:
    for precision, most, tensors in (("float64", 1e-12, ONE), ("float32", 1e-5, HONEST)):
        assert [rung(precision, 1 + part * most, **tensors).passed for part in (0.9, 1.1)] == [True, False]


def test_16_bits_of_a_mixture_of_experts_are_not_judged() -> None:
    """Only the median tensor counts, and what is not finite."""
    exact, unjudged = {"v": (1.0, 1e-2, 1e-2), "x": (1.0, 1e-2, 1e-2)}, partial(rung, "bfloat16", judged=False)
    assert [unjudged(w=(1.0, 1e-2, error)).passed for error in (0.09, 0.11)] == [True, False]
    assert [unjudged(w=(1.0, 1e-2, error), **exact).passed for error in (0.2, inf)] == [True, False]
    assert not unjudged(loss=float("nan"), **exact).passed


def names(tensors: Sequence[TensorError]) -> list[str]:
    return [tensor.name for tensor in tensors]


def test_every_tensor_is_alive_or_dead() -> None:
    made = rung("float64", w=(1.0, 0.0, 0.0), small=(1e-11, 0.0, 0.0), zero=(1e-12, 0.0, 0.0))
    assert (names(made.alive), names(made.dead)) == (["w", "small"], ["zero"])
    made = rung("float32", w=(1.0, 0.0, 0.0), small=(1e-5, 0.0, 0.0), drowned=(1e-6, 0.0, 0.0))
    assert names(made.dead) == ["drowned"]


def test_the_furthest_tensor_is_the_first_that_failed() -> None:
    made = rung("float64", good=(1.0, 0.0, 0.0), off=(1.0, 0.0, 1e-3), nan=(1.0, 0.0, inf), far=(1.0, 0.0, 1e-1))
    assert names(made.failed) == ["nan", "far", "off"]


@pytest.mark.parametrize("ordinary_loss", [1.0, 1.655, float("nan")])
def test_an_ordinary_model_that_disagrees_with_itself_gets_no_verdict(ordinary_loss: float) -> None:
    tensors = TensorError("w", 1.0, 1e-3, 1e-3), TensorError("v", 1.0, 2e-3, 2e-3)
    loss = TensorError("the loss", 1.0, 0.0, 0.0, (), (ordinary_loss, ordinary_loss, 1.0))
    made = Rung("float64", loss, tensors)
    assert not made.passed
    assert made.reason.startswith(
        f"no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on its own, "
        f"disagree by 2.0e-03 in v; their losses are {ordinary_loss:g} and 1. The gradient may be"
    )


def test_a_gradient_that_is_truly_zero_proves_little() -> None:
    report = EquivalenceReport((rung("float64", **ONE, zero=(1e-17, 0.0, 1e-17)),))
    assert report.passed and not report.conclusive
    assert "zero: zero: the true gradient is zero on this data" in str(report)


PRECISIONS = ["float64", "float32", "bfloat16"]
FAILED = [
    (rung("float64", **ONE, zero=(0.0, 0.0, 5.0)), "zero should be zero and is off by 5.0e+00"),
    (rung("float64", **ONE, zero=(0.0, 0.0, inf)), "zero should be zero and is off by inf"),
    (rung("float32", w=(0.0, 0.0, 0.0)), "no gradient is alive"),
    (rung("float64", loss=1.1, **ONE), "the loss is off by 1.0e-01, at most 1.0e-12 is rounding"),
    *((rung(precision, w=(1.0, 1e-16, inf)), "w is off by inf") for precision in PRECISIONS),
    (rung("float64", **ONE, broken=(float("nan"), inf, inf)), "no verdict: two ordinary ways"),
    *((rung(precision, **ONE, broken=(float("nan"), inf, inf)), "broken is off by") for precision in PRECISIONS[1:]),
]


@pytest.mark.parametrize(("made", "reason"), FAILED)
def test_the_reason_of_a_failure(made: Rung, reason: str) -> None:
    report = EquivalenceReport((made,))
    assert not report.passed and report.reason.startswith(f"{made.precision}: NOT EQUAL: {reason}")


def test_the_reason_names_the_parameter_the_element_and_its_values() -> None:
    truth = Gradients(1.0, {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)})
    off = torch.ones(2, 3)
    off[1, 2] = 1.5
    made = compare_gradients("float64", truth, truth, Gradients(1.0, {**truth.tensors, "a.weight": off}))
    reason = EquivalenceReport((made,)).reason
    assert reason.startswith("float64: NOT EQUAL: a.weight is off by 2.0e-01, at most 1.0e-12 is rounding")
    assert reason.endswith("worst element [1, 2]: radix 1.5, ordinary 1, truth 1")


def test_the_report_is_a_table() -> None:
    lines = str(verify_equivalence(tiny_qwen3().bfloat16(), FEATURES)).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["float64", "float32", "bfloat16"]
    assert all(line.endswith("equal") for line in lines[2:5])
    assert max(map(len, lines)) <= 120
