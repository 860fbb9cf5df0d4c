"""What a pass of generation gives attention: windows through the slots of each sequence, and rows as slices."""

import numpy as np
import pytest
import torch

from radixtrain.tree.cached_layout import CachedLayout, Paths, shared_piece, shared_pieces

CPU = torch.device("cpu")
# Three sequences with 1, 2 and 4 new rows, which are the last of their slots.
SLOTS = [[10, 11, 12, 13, 14], [10, 11, 20, 21], [30, 31, 32, 33]]
NEW = [0, 1, 3, 7]


def paths(asked: list[int] | None = None) -> Paths:
    def slots_of(run: int) -> np.ndarray:
        if asked is not None:
            asked.append(run)
        return np.array(SLOTS[run])

    return Paths(np.array(NEW), slots_of)


def layout(of: Paths) -> CachedLayout:
    return CachedLayout(7, 5, None, torch.arange(7), (), of)


class TestPaths:
    def test_within_is_what_the_queries_see(self) -> None:
        for window in range(1, 7):
            slots, cu_seqlens = paths().within(window)
            for run, count in enumerate(np.diff(NEW)):
                seen = {slot for new in range(count) for slot in SLOTS[run][: len(SLOTS[run]) - new][-window:]}
                assert set(slots[slice(*cu_seqlens[run : run + 2])].tolist()) == seen


class TestWindowed:
    def test_call_literally(self) -> None:
        slots, call = layout(paths()).windowed(2)
        assert slots.tolist() == [13, 14, 11, 20, 21, 30, 31, 32, 33] and slots.dtype == torch.int64
        assert call.cu_seqlens_q.tolist() == NEW and call.cu_seqlens_q.dtype == torch.int32
        assert call.cu_seqlens_k.tolist() == [0, 2, 5, 9] and call.cu_seqlens_k.dtype == torch.int32
        assert (call.max_seqlen_q, call.max_seqlen_k, call.causal) == (4, 4, True)
        assert call.bounds == ((0, 1, 0, 2), (1, 3, 2, 5), (3, 7, 5, 9))

    def test_layers_of_one_window_share_it(self) -> None:
        asked: list[int] = []
        each = layout(paths(asked))
        first = each.windowed(2)
        assert each.windowed(2) is first and asked == [0, 1, 2]
        assert each.windowed(3)[0].tolist() != first[0].tolist(), "another window is another call"


class TestSharedPiece:
    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([3], slice(3, 4)),
            ([3, 4, 5], slice(3, 6)),
            ([0], slice(0, 1)),
            ([3, 5], [3, 5]),
            ([5, 4, 3], [5, 4, 3]),
            ([2, 4, 3, 5], [2, 4, 3, 5]),  # as many as from first to last, in another order
            ([1, 3, 2], [1, 3, 2]),
        ],
        ids=str,
    )
    def test_rows_that_follow_each_other_are_a_slice(self, rows: list[int], expected: slice | list[int]) -> None:
        piece = shared_piece(rows, np.array(rows), CPU)
        for found in (piece.q_rows, piece.k_rows):
            if isinstance(expected, slice):
                assert found == expected
            else:
                assert isinstance(found, torch.Tensor) and found.dtype == torch.int64
                assert found.tolist() == expected

    def test_call_literally(self) -> None:
        call = shared_piece([0, 2, 3], np.array([7, 8]), CPU).ragged
        assert (call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()) == ([0, 3], [0, 2])
        assert {call.cu_seqlens_q.dtype, call.cu_seqlens_k.dtype} == {torch.int32}
        assert (call.max_seqlen_q, call.max_seqlen_k, call.causal) == (3, 2, False)
        assert call.bounds == ((0, 3, 0, 2),), "one rectangle, whatever the rows"


class TestSharedPieces:
    def pieces(self, *runs: tuple[list[int], list[int]], device: str = "cpu") -> list[tuple]:
        """Rows of queries and keys, and the bounds of the call."""
        arrays = [(np.array(rows), np.array(slots)) for rows, slots in runs]
        found = shared_pieces(arrays, torch.device(device))
        return [(piece.q_rows, piece.k_rows, piece.ragged.bounds) for piece in found]

    def test_runs_without_a_common_query_are_one_call(self) -> None:
        """Rows 0 1 and 4 5 6 with slots of their own, which the rows between them do not see."""
        found = self.pieces(([4, 5, 6], [20, 21]), ([0, 1], [30, 31, 32]))
        assert found == [(slice(0, 7), slice(None), ((0, 2, 30, 33), (4, 7, 20, 22)))]

    def test_runs_with_a_common_query_are_several(self) -> None:
        """The one that most queries see first."""
        found = self.pieces(([2, 3], [7]), ([0, 1, 2, 3], [1, 2]), ([0, 1], [5, 6]))
        assert found == [
            (slice(0, 4), slice(None), ((0, 4, 1, 3),)),
            (slice(0, 4), slice(None), ((0, 2, 5, 7), (2, 4, 7, 8))),
        ]

    @pytest.mark.parametrize("run", [([0, 2], [7, 8]), ([0, 1], [7, 9])], ids=["rows", "slots"])
    def test_what_is_no_range_is_gathered(self, run: tuple[list[int], list[int]]) -> None:
        ((q_rows, k_rows, bounds),) = self.pieces(run)
        assert bounds == ((0, 2, 0, 2),)
        for found, expected in ((q_rows, run[0]), (k_rows, run[1])):
            assert np.arange(50)[found].tolist() == expected

    def test_a_device_takes_a_call_for_each(self) -> None:
        """Torch's meta device stands in for CUDA."""
        found = self.pieces(([4, 5, 6], [20, 21]), ([0, 1], [30, 31, 32]), device="meta")
        assert [each[:2] for each in found] == [(slice(4, 7), slice(20, 22)), (slice(0, 2), slice(30, 33))]
