"""The rows of a padded batch, and the refusal of a loss that reads its padding.

That unique rows come back at their places, with their gradients: tests/claims/padded.
"""

from typing import Any

import numpy as np
import pytest
import torch

from radixtrain.errors import UserError
from radixtrain.hf.padded.places import PLACES_AT_A_TIME, PaddedIds, check_gradient_at
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan


def read(ids: Any, mask: Any = None, positions: Any = None) -> PaddedIds:
    return PaddedIds.of(*(None if each is None else np.array(each) for each in (ids, mask, positions)))


def plan_of(rows: PaddedIds) -> PrefixPlan:
    return build_prefix_plan(rows.input_ids[rows.attended], rows.cu_seqlens, rows.attended_positions)


class TestLiteral:
    IDS, MASK = [[7, 8, 9, 0], [0, 7, 8, 5]], [[1, 1, 1, 0], [0, 1, 1, 1]]

    def test_unique_rows_and_places(self):
        """The table of its docstring."""
        rows = read(self.IDS, self.MASK)
        plan = plan_of(rows)
        assert rows.input_ids[rows.attended][plan.gather_indices].tolist() == [7, 8, 5, 9]
        assert rows.places(plan.inverse_indices, plan.num_rows).rows.tolist() == [[0, 1, 3, 4], [4, 0, 1, 2]]
        assert rows.cu_seqlens.tolist() == [0, 3, 6]
        assert (rows.is_left_padded, rows.has_holes, rows.is_packed, rows.max_position) == (True, False, False, 3)


def test_ids_that_are_equal_only_in_their_lower_32_bits():
    assert plan_of(read([[7, 8], [7 + 2**32, 8]])).num_rows == 4


def test_with_a_mask_a_jump_of_positions_starts_no_sequence():
    """Hugging Face looks for packed sequences only without a mask."""
    rows = read([[7, 8, 9]], [[1, 1, 1]], [[0, 1, 0]])
    assert not rows.is_packed and rows.cu_seqlens.tolist() == [0, 3] and rows.attended_positions.tolist() == [0, 1, 0]


HIDES = r"the loss reads {} places that attention_mask hides.*set the labels of padding to -100.*first token of a row"


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

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_lost_everywhere(self, value):
        """0 times infinity. What is finite at padding was read for certain."""
        self.backward(torch.tensor([[1.0, value], [0.0, float("nan")]]), [1])
        with pytest.raises(UserError, match=HIDES.format(1)):
            self.backward(torch.tensor([[1.0, value], [1.0, float("nan")]]), [1])

    def test_more_places_than_are_checked_at_a_time(self):
        weights = torch.zeros(3 * PLACES_AT_A_TIME, 1)
        weights[[0, -1]] = 1
        with pytest.raises(UserError, match=HIDES.format(2)):
            self.backward(weights, list(range(len(weights))))
