"""The ids of a padded batch, and the refusal of a loss that reads its padding.

That unique rows come back at their places, with their gradients: tests/claims/padded.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from radixtrain.errors import UserError
from radixtrain.hf.padded.places import PLACES_AT_A_TIME, PaddedIds, check_gradient_at
from radixtrain.tree.plan import build_prefix_plan


def test_ids_that_are_equal_only_in_their_lower_32_bits():
    rows = PaddedIds.of(np.array([[7, 8], [7 + 2**32, 8]]), None, None)
    assert build_prefix_plan(rows.input_ids[rows.attended], rows.cu_seqlens).num_rows == 4


HIDES = r"the loss reads {} places that attention_mask hides.*set the labels of padding to -100.*first token of a row"


def go_backward(weights: torch.Tensor, padding: list[int]) -> None:
    x = torch.ones(weights.shape, dtype=torch.float64, requires_grad=True)
    y = x * 1
    check_gradient_at(torch.tensor(padding), y)
    (y * weights).sum().backward()


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("elsewhere", [[1.0, 1.0], [1.0, NAN], [1.0, INFINITY]])
@pytest.mark.parametrize(
    ("at_padding", "is_read"),
    [([0.0, -0.0], False), ([0.0, 1.0], True), ([1e-300, NAN], True), ([0.0, NAN], None), ([0.0, INFINITY], None)],
)
def test_any_number_at_padding_was_read(elsewhere: list[float], at_padding: list[float], is_read: bool | None) -> None:
    """Except 0 times infinity, where all is lost. What is finite at padding was read for certain."""
    is_read = elsewhere == [1.0, 1.0] if is_read is None else is_read
    with pytest.raises(UserError, match=HIDES.format(1)) if is_read else nullcontext():
        go_backward(torch.tensor([elsewhere, at_padding, elsewhere], dtype=torch.float64), [1])


def test_more_places_than_are_checked_at_a_time() -> None:
    weights = torch.zeros(3 * PLACES_AT_A_TIME, 1)
    weights[[0, -1]] = 1
    with pytest.raises(UserError, match=HIDES.format(2)):
        go_backward(weights, list(range(len(weights))))
