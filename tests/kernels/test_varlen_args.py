"""Scores of products, with and without a soft-cap, and their gradient."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from radixtrain.kernels.varlen_args import Scoring

PRODUCTS = torch.tensor([-1000.0, 0.0, 0.5, 1000.0], dtype=torch.float64)


def test_literally() -> None:
    assert Scoring(0.5).of(PRODUCTS).tolist() == [-500.0, 0.0, 0.25, 500.0]
    capped = Scoring(2.0, softcap=30.0).of(PRODUCTS)
    assert capped.tolist() == pytest.approx([-30.0, 0.0, 30 * math.tanh(1 / 30), 30.0], rel=1e-12)


def test_a_window_does_not_change_a_score() -> None:
    assert torch.equal(Scoring(2.0, 30.0, window=1).of(PRODUCTS), Scoring(2.0, 30.0).of(PRODUCTS))


def test_gradcheck() -> None:
    products = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(Scoring(0.5, softcap=0.8).of, products)


def test_a_key_of_a_dictionary() -> None:
    assert hash(Scoring(1.0, window=3)) == hash(Scoring(1.0, None, 3))
    assert Scoring(1.0, window=3) != Scoring(1.0, window=4)
