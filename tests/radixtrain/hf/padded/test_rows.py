"""The rows of a padded batch, and unique rows back at their places."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixtrain.errors import UserError
from radixtrain.hf.padded.rows import PLACES_AT_A_TIME, PaddedRows, Places, check_gradient_at
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan


def read(ids: Any, mask: Any = None, positions: Any = None) -> PaddedRows:
    return PaddedRows.read(*(None if each is None else torch.as_tensor(each) for each in (ids, mask, positions)))


def plan_of(rows: PaddedRows) -> PrefixPlan:
    return build_prefix_plan(rows.input_ids[rows.kept], rows.cu_seqlens, rows.kept_positions)


class TestLiteral:
    IDS, MASK = [[7, 8, 9, 0], [0, 7, 8, 5]], [[1, 1, 1, 0], [0, 1, 1, 1]]

    def test_unique_rows_and_places(self):
        """The table of the module's docstring."""
        rows = read(self.IDS, self.MASK)
        plan = plan_of(rows)
        assert rows.input_ids[rows.kept][plan.gather_indices].tolist() == [7, 8, 5, 9]
        assert rows.places(plan).tolist() == [0, 1, 3, 4, 4, 0, 1, 2]
        assert rows.cu_seqlens.tolist() == [0, 3, 6]
        assert (rows.is_left_padded, rows.has_holes, rows.is_packed, rows.max_position) == (True, False, False, 3)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float16, torch.float64])
    def test_any_mask_dtype(self, dtype):
        mask = torch.tensor(self.MASK).to(dtype) * (0.5 if dtype.is_floating_point else 1)
        assert read(self.IDS, mask).kept.tolist() == torch.tensor(self.MASK).bool().tolist()

    def test_a_change_of_the_batch_afterwards_is_not_seen(self):
        ids = torch.tensor(self.IDS)
        rows = read(ids)
        ids.zero_()
        assert rows.input_ids.tolist() == self.IDS


class TestSequences:
    @pytest.mark.parametrize(
        ("mask", "cu_seqlens"),
        [
            (None, [0, 3, 6, 9]),
            ([[1, 1, 0], [0, 0, 0], [0, 1, 1]], [0, 2, 2, 4]),
            ([[0, 0, 0]] * 3, [0, 0, 0, 0]),
        ],
        ids=["no mask", "a hidden row", "all hidden"],
    )
    def test_cu_seqlens(self, mask, cu_seqlens):
        assert read([[7, 8, 9]] * 3, mask).cu_seqlens.tolist() == cu_seqlens

    def test_ids_that_are_equal_only_in_their_lower_32_bits(self):
        rows = read([[7, 8], [7 + 2**32, 8]])
        assert plan_of(rows).num_rows == 4


@pytest.mark.parametrize(
    ("row", "hole", "left"),
    [
        ([1, 1, 1], False, False),
        ([1, 1, 0], False, False),
        ([0, 1, 1], False, True),
        ([0, 1, 0], False, True),
        ([1, 0, 1], True, False),
        ([0, 0, 0], False, False),
    ],
)
def test_holes_and_left_padding(row, hole, left):
    rows = read([[7, 8, 9]] * 2, [[1, 1, 1], row])
    assert (rows.has_holes, rows.is_left_padded) == (hole, left)


class TestPositions:
    def test_of_kept_tokens(self):
        rows = read([[7, 8, 9], [0, 7, 8]], [[1, 1, 1], [0, 1, 1]], [[0, 1, 2], [1, 0, 1]])
        assert rows.kept_positions.tolist() == [0, 1, 2, 0, 1]

    def test_one_line_for_all_rows(self):
        assert read([[7, 8], [7, 9]], None, [[5, 6]]).kept_positions.tolist() == [5, 6, 5, 6]

    def test_the_same_tokens_at_other_positions_are_other_rows(self):
        assert plan_of(read([[7, 8], [7, 8]], None, [[0, 1], [3, 4]])).num_rows == 4

    def test_the_largest_counts_padding_too(self):
        assert read([[7, 8, 0]], [[1, 1, 0]], [[0, 1, 90]]).max_position == 90

    @pytest.mark.parametrize(("positions", "negative"), [([[-1, 0, 1]], False), ([[-1, -1, 0]], True)])
    def test_negative_ones_count_if_they_are_kept(self, positions, negative):
        assert read([[0, 7, 8]], [[0, 1, 1]], positions).has_negative_positions is negative


class TestPacked:
    @pytest.mark.parametrize(
        ("positions", "cu_seqlens", "places"),
        [
            ([0, 1, 2, 0, 1], [0, 3, 5], [0, 1, 2, 0, 1]),
            ([0, 0, 0, 1, 2], [0, 1, 2, 5], [0, 1, 2, 3, 4]),
            ([0, 1, 2, 3, 0], [0, 4, 5], [0, 1, 2, 3, 4]),
        ],
    )
    def test_sequences_of_one_row(self, positions, cu_seqlens, places):
        """A prefix is shared within the row."""
        rows = read([[7, 8, 9, 7, 8]], None, [positions])
        assert rows.is_packed and rows.packing_is_plain and rows.kept_positions is None
        assert rows.cu_seqlens.tolist() == cu_seqlens and rows.places(plan_of(rows)).tolist() == places

    @pytest.mark.parametrize(
        ("ids", "positions"),
        [
            ([[7, 8, 9]], [[2, 3, 0]]),
            ([[7, 8, 9]], [[0, 1, 5]]),
            ([[7, 8, 9], [7, 8, 9]], [[0, 1, 0]]),
        ],
        ids=["starts later", "jumps ahead", "two rows"],
    )
    def test_not_plain(self, ids, positions):
        rows = read(ids, None, positions)
        assert rows.is_packed and not rows.packing_is_plain

    def test_with_a_mask_a_jump_starts_no_sequence(self):
        """Hugging Face looks for packed sequences only without a mask."""
        rows = read([[7, 8, 9]], [[1, 1, 1]], [[0, 1, 0]])
        assert not rows.is_packed and rows.cu_seqlens.tolist() == [0, 3] and rows.kept_positions.tolist() == [0, 1, 0]


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=6), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
def test_every_place_has_the_history_of_its_unique_row(sequences, offsets):
    """Rows of 4 different ids with padding on both sides, some of them empty."""
    width = 9
    ids, mask = np.zeros((2, len(sequences), width), dtype=np.int64)
    for row, (sequence, offset) in enumerate(zip(sequences, offsets, strict=False)):
        ids[row, offset : offset + len(sequence)] = sequence
        mask[row, offset : offset + len(sequence)] = 1
    rows = read(ids, mask)
    plan = plan_of(rows)
    places = rows.places(plan).reshape(ids.shape)
    assert (places[mask == 0] == plan.num_rows).all()
    history_of: dict[int, list[int]] = {}
    for sequence, row, kept in zip(sequences, places, mask.astype(bool), strict=True):
        for end, place in enumerate(row[kept].tolist(), start=1):
            assert history_of.setdefault(place, sequence[:end]) == sequence[:end]
    assert len(history_of) == plan.num_rows == len({tuple(history) for history in history_of.values()})


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
