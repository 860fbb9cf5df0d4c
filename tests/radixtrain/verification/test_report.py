"""The verdict in words, and the table."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixtrain.verification.bars import TensorError
from radixtrain.verification.equivalence import compare_gradients, verify_equivalence
from radixtrain.verification.oracle import Gradients
from radixtrain.verification.report import EquivalenceReport, Rung

FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
]


def rung(precision: str = "float32", loss: float = 1.0, **errors: tuple[float, ...]) -> Rung:
    """A rung of parameters given as name=(norm, ordinary difference, radix difference)."""
    tensors = tuple(TensorError(name, *numbers) for name, numbers in errors.items())
    return Rung(precision, 1.0, 1.0, loss, tensors)


def test_an_ordinary_model_that_disagrees_with_itself_gets_no_verdict() -> None:
    made = rung("float64", w=(1.0, 1e-3, 1e-3), v=(1.0, 2e-3, 2e-3))
    assert not made.passed
    assert made.reason == (
        "no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on its "
        "own, disagree by 2.0e-03 in v. Their losses agree (1): the gradient may be too ill-conditioned for float64"
    )


@pytest.mark.parametrize("ordinary_loss", [1.655, float("nan")])
def test_nor_does_one_whose_ordinary_loss_is_wrong(ordinary_loss: float) -> None:
    tensors = (TensorError("w", 1.0, 1e-3, 1e-3),)
    made = Rung("float64", 6.21, ordinary_loss, ordinary_loss, tensors)
    assert made.reason == (
        "no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on its "
        f"own, disagree by 1.0e-03 in w. So do their losses, {ordinary_loss:.9g} and 6.21: either the model "
        "computes something else for a sequence that has padding or other sequences beside it, or the padded "
        "batch does not have the model's own loss"
    )


def test_a_gradient_that_is_truly_zero_proves_little() -> None:
    report = EquivalenceReport((rung("float64", w=(1.0, 0.0, 0.0), zero=(1e-17, 0.0, 1e-17)),))
    assert report.passed and not report.conclusive
    assert "zero: zero: the true gradient is zero on this data" in str(report)


def test_a_gradient_that_should_be_zero_and_is_not_fails() -> None:
    made = rung("float64", w=(1.0, 0.0, 0.0), zero=(0.0, 0.0, 5.0))
    assert "zero should be zero and is off by 5.0e+00" in made.reason


def test_a_report_without_a_gradient_alive_fails() -> None:
    report = EquivalenceReport((rung("float64", w=(0.0, 0.0, 0.0)),))
    assert not report.passed
    assert "no gradient is alive" in report.reason


def test_the_reason_names_the_parameter_the_element_and_its_values() -> None:
    truth = Gradients(1.0, {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)})
    off = torch.ones(2, 3)
    off[1, 2] = 1.5
    made = compare_gradients("float64", truth, truth, Gradients(1.0, {**truth.tensors, "a.weight": off}))
    reason = EquivalenceReport((made,)).reason
    assert reason.startswith("float64: NOT EQUAL: a.weight is off by 2.0e-01, at most 1.0e-12 is rounding")
    assert reason.endswith("worst element [1, 2]: radix 1.5, ordinary 1, truth 1")


def test_the_reason_names_the_loss_if_only_that_is_wrong() -> None:
    reason = EquivalenceReport((rung("float64", loss=1.1, w=(1.0, 0.0, 0.0)),)).reason
    assert reason.startswith("float64: NOT EQUAL: the loss is 1.1 and in truth 1, 1.0e-01 apart")


def test_the_report_is_a_table(tiny_qwen3: Callable[..., Any]) -> None:
    lines = str(verify_equivalence(tiny_qwen3().bfloat16(), FEATURES)).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["float64", "float32", "bfloat16"]
    assert all(line.endswith("equal") for line in lines[2:5])
    assert "5 of 24 tensors, those nearest their bar" in lines[6]
    assert max(map(len, lines)) <= 120


def test_the_table_lists_a_tensor_that_failed_in_any_rung() -> None:
    names = [f"w{index}" for index in range(9)]
    exact = {name: (1.0, 1e-16, 1e-16 * (9 - index)) for index, name in enumerate(names)}
    rounded = {**dict.fromkeys(names, (1.0, 1e-2, 1e-2)), "w8": (1.0, 1e-2, 0.5)}
    report = EquivalenceReport((rung("float64", **exact), rung("bfloat16", **rounded)))
    assert str(report).splitlines()[7].endswith("  w8")
