"""Unique rows at their places, and a gradient at padding that ends in an error."""

import numpy as np
import pytest
import torch

from radixtrain.errors import UserError
from radixtrain.hf.padded.spread import PLACES_AT_A_TIME, Places, check_gradient_at

CPU = torch.device("cpu")
KEPT = np.array([[True, True, False], [False, True, True]])
PLACES = Places.on(CPU, KEPT, np.array([0, 1, 3, 3, 0, 2]))
HIDES = r"the loss reads {} places that attention_mask hides.*set the labels of padding to -100.*first token of a row"


def unique_rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([[1, 10], [2, 20], [3, 30]], dtype=dtype, requires_grad=True)


def spread(rows: torch.Tensor) -> torch.Tensor:
    return PLACES.spread(PLACES.with_padding(rows))


class TestSpread:
    def test_literal(self):
        assert PLACES.padding.tolist() == [2, 3]
        kept = spread(unique_rows())[torch.from_numpy(KEPT).flatten()]
        assert kept.tolist() == [[1, 10], [2, 20], [1, 10], [3, 30]]

    def test_padding_has_a_row_of_numbers_and_no_gradient(self):
        """Not zeros: divided by their norm they are NaN, and the gradient of a square is 0 there."""
        rows = unique_rows()
        assert spread(rows)[PLACES.padding].isfinite().all()
        with pytest.raises(UserError, match=HIDES.format(2)):
            spread(rows).square().sum().backward()

    def test_padding_of_rows_that_nothing_learns(self):
        """A frozen model, and a head after it that reads padding."""
        head = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
        with pytest.raises(UserError, match=HIDES.format(2)):
            (spread(unique_rows().detach()) @ head).sum().backward()

    def test_the_gradient_of_a_row_is_the_sum_over_its_places(self):
        rows = unique_rows()
        weights = torch.tensor([[1.0], [2.0], [0.0], [0.0], [4.0], [8.0]])
        (spread(rows) * weights).sum().backward()
        assert rows.grad.tolist() == [[5, 5], [2, 2], [8, 8]]

    def test_gradcheck(self):
        """Of the kept places; row 0 stands at two of them."""
        kept = torch.from_numpy(np.flatnonzero(KEPT))
        assert torch.autograd.gradcheck(lambda rows: spread(rows)[kept], unique_rows())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_dtype_and_more_axes_stay(self, dtype):
        placed = spread(torch.ones(3, 2, 4, dtype=dtype))
        assert (placed.dtype, tuple(placed.shape)) == (dtype, (6, 2, 4))

    def test_rows_that_are_not_contiguous(self):
        rows = unique_rows().detach()
        assert torch.equal(spread(rows.t().contiguous().t()), spread(rows))

    def test_without_padding_every_place_may_be_read(self):
        places = Places.on(CPU, np.ones((2, 2), dtype=bool), np.array([0, 1, 0, 2]))
        rows = unique_rows()
        places.spread(places.with_padding(rows)).sum().backward()
        assert rows.grad.tolist() == [[2, 2], [1, 1], [1, 1]]


class TestGradientAtPadding:
    def backward(self, weights: torch.Tensor, padding: list[int]) -> None:
        x = torch.ones(weights.shape, dtype=torch.float64, requires_grad=True)
        y = x * 1
        check_gradient_at(torch.tensor(padding), y)
        (y * weights).sum().backward()

    def test_none(self):
        self.backward(torch.tensor([[1.0, 1.0], [0.0, -0.0], [1.0, 1.0]]), [1])

    @pytest.mark.parametrize("value", [1.0, 1e-300, float("nan"), float("inf")])
    def test_any_value(self, value):
        with pytest.raises(UserError, match=HIDES.format(1)):
            self.backward(torch.tensor([[1.0, 1.0], [0.0, value]], dtype=torch.float64), [1])

    def test_what_cancels_in_a_sum(self):
        weights = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
        with pytest.raises(UserError, match=HIDES.format(2)):
            self.backward(weights, [0, 2])

    def test_more_places_than_are_checked_at_a_time(self):
        weights = torch.zeros(3 * PLACES_AT_A_TIME, 1)
        weights[[0, -1]] = 1
        with pytest.raises(UserError, match=HIDES.format(2)):
            self.backward(weights, list(range(len(weights))))

    def test_a_gradient_that_is_undefined(self):
        """A loss of weight 0 may return None."""

        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sum()

            @staticmethod
            def backward(ctx, grad):
                return None

        rows = unique_rows()
        Nothing.apply(spread(rows)).backward()
        assert rows.grad is None or not rows.grad.any()
