"""How large an error may be: what passes, and what just does not."""

import pytest

from radixtrain.verification.bars import TensorError
from radixtrain.verification.report import Rung

HONEST = {"w": (1.0, 1e-6, 1e-6), "v": (1.0, 1e-6, 1e-6), "x": (1.0, 1e-6, 1e-6)}


def rung(precision: str = "float32", loss: float = 1.0, judged: bool = True, **errors: tuple[float, ...]) -> Rung:
    """A rung of parameters given as name=(norm, ordinary difference, radix difference)."""
    tensors = tuple(TensorError(name, *numbers) for name, numbers in errors.items())
    return Rung(precision, 1.0, 1.0, loss, tensors, judged)


@pytest.mark.parametrize(
    ("made", "passed"),
    [
        (rung("float64", w=(1.0, 1e-15, 9e-13)), True),
        (rung("float64", w=(1.0, 1e-15, 2e-12)), False),
        (rung("float64", loss=1.0 + 1e-11, w=(1.0, 0.0, 0.0)), False),
        (rung("float64", w=(1.0, 0.0, 0.0), small=(1e-4, 0.0, 1e-15)), True),
        (rung("float64", w=(1.0, 0.0, 0.0), small=(1e-4, 0.0, 2e-15)), False),
        (rung("float64", ill_conditioned=(1.0, 2e-13, 1e-11)), True),
        (rung("float64", ill_conditioned=(1.0, 2e-13, 3e-11)), False),
        (rung("float64", w=(1.0, 0.0, 0.0), tiny=(1e-9, 1e-16, 1e-17)), True),
        (rung("float64", w=(1.0, 0.0, 0.0), tiny=(1e-3, 1e-13, 2e-12)), False),
        (rung("float64", w=(1.0, 0.0, float("nan"))), False),
        (rung("float64", w=(1.0, 0.0, 0.0), zero=(1e-17, 1e-17, 1e-17)), True),
        (rung("float64", w=(1.0, 0.0, 0.0), zero=(0.0, 0.0, 1e-9)), False),
        (rung("float64", w=(1.0, 0.0, 0.0), zero=(0.0, 0.0, float("nan"))), False),
        (rung("float32", **HONEST), True),
        (rung("float32", **{**HONEST, "x": (1.0, 1e-6, 9e-6)}), True),
        (rung("float32", **{**HONEST, "x": (1.0, 1e-6, 1.1e-5)}), False),
        (rung("float32", **{**HONEST, "x": (1.0, 1e-8, 9e-6)}), True),
        (rung("float32", **{**HONEST, "x": (1.0, 0.9, 1e-6), "v": (1.0, 1e-6, 1.1e-5)}), False),
        (rung("float32", **dict.fromkeys("wvx", (1.0, 1e-6, 3e-6))), False),
        (rung("float32", loss=1.0 + 4e-6, **HONEST), False),
        (rung("float32", **HONEST, drowned=(1e-7, 1e-7, 9e-7)), True),
        (rung("float32", **HONEST, drowned=(1e-7, 1e-7, 1.1e-5)), False),
        (rung("float32", w=(0.0, 0.0, 0.0)), False),
        (rung("bfloat16", w=(1.0, 1e-2, float("inf"))), False),
        (rung("bfloat16", judged=False, w=(1.0, 1e-2, 9e-2)), True),
        (rung("bfloat16", judged=False, w=(1.0, 1e-2, 2e-1)), False),
        (rung("bfloat16", judged=False, w=(1.0, 1e-2, float("nan"))), False),
        (rung("bfloat16", judged=False, loss=float("nan"), w=(1.0, 1e-2, 1e-2)), False),
    ],
)
def test_what_passes(made: Rung, passed: bool) -> None:
    assert made.passed is passed
    assert bool(made.reason) is not passed


def test_the_loss_has_a_bar_of_its_own() -> None:
    """At least a few roundings, and three times the error of the ordinary loss."""
    tensors = rung(**HONEST).tensors
    assert Rung("float32", 1.0, 1.0 + 1e-8, 1.0, tensors).loss_bar == pytest.approx(1e-6)
    assert Rung("float32", 1.0, 1.0 + 1e-4, 1.0, tensors).loss_bar == pytest.approx(3e-4)
    assert Rung("float64", 1.0, 1.0, 1.0, tensors).loss_bar == 1e-12
    assert Rung("float64", 1.0, 1.0 + 1e-13, 1.0, tensors).loss_bar == pytest.approx(1e-11, rel=1e-2)
    assert Rung("float64", 1.0, 2.0, 1.0, tensors).loss_bar == 1e-9


def test_every_tensor_is_alive_or_dead() -> None:
    made = rung("float64", w=(1.0, 0.0, 0.0), small=(1e-11, 0.0, 0.0), zero=(1e-12, 0.0, 0.0))
    assert [tensor.name for tensor in made.alive] == ["w", "small"]
    assert [tensor.name for tensor in made.dead] == ["zero"]
    made = rung("float32", w=(1.0, 0.0, 0.0), small=(1e-5, 0.0, 0.0), drowned=(1e-6, 0.0, 0.0))
    assert [tensor.name for tensor in made.dead] == ["drowned"]


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_a_truth_that_is_not_a_number_is_alive_and_fails(precision: str) -> None:
    nan = float("nan")
    made = rung(precision, w=(1.0, 1e-16, 1e-16), broken=(nan, nan, nan))
    assert not made.passed and not made.dead
    assert made.worst.name == "broken" and [tensor.name for tensor in made.failed] == ["broken"]


def test_the_furthest_tensor_is_the_first_that_failed() -> None:
    nan = float("nan")
    made = rung("float64", good=(1.0, 0.0, 0.0), off=(1.0, 0.0, 1e-3), nan=(1.0, 0.0, nan), far=(1.0, 0.0, 1e-1))
    assert [tensor.name for tensor in made.failed] == ["nan", "far", "off"]
    assert made.share(made.tensors[0]) == 0.0
    assert made.share(made.tensors[1]) == pytest.approx(1e9, rel=1e-2)
