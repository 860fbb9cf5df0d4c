"""What is read off a padded batch: its kept tokens, its positions, its sequences, and where each unique row stands."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixtrain.hf.padded.rows import PaddedRows
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
