"""Stored rows that several queries see are as few calls as can be."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixtrain.tree.shared_pieces import shared_pieces


class TestSharedPieces:
    def pieces(self, *runs: tuple[list[int], list[int]], device: str = "cpu") -> list[tuple]:
        """Rows of queries and keys, and the bounds of the call."""
        arrays = [(np.array(rows), np.array(slots)) for rows, slots in runs]
        found = shared_pieces(arrays, torch.device(device))
        return [(piece.q_rows, piece.k_rows, piece.ragged.bounds) for piece in found]

    def test_runs_without_a_common_query_are_one_call(self) -> None:
        """Rows 0 1 and 4 5 6 with slots of their own, which the rows between them do not see."""
        found = self.pieces(([4, 5, 6], [20, 21]), ([0, 1], [30, 31, 32]))
        assert found == [(slice(0, 7), slice(20, 33), ((0, 2, 10, 13), (4, 7, 0, 2)))]

    def test_runs_with_a_common_query_are_several(self) -> None:
        """The one that most queries see first."""
        found = self.pieces(([2, 3], [7]), ([0, 1, 2, 3], [1, 2]), ([0, 1], [5, 6]))
        assert found == [
            (slice(0, 4), slice(1, 3), ((0, 4, 0, 2),)),
            (slice(0, 4), slice(5, 8), ((0, 2, 0, 2), (2, 4, 2, 3))),
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

    @pytest.mark.parametrize("number", [1, 20])
    def test_a_device_gets_the_bounds_of_all_runs_in_one_copy(self, number: int) -> None:
        runs = [(np.arange(4), np.arange(5 * each, 5 * each + each + 1)) for each in range(number)]
        with CopiesOnTheHost() as copies:
            pieces = shared_pieces(runs, torch.device("meta"))
        assert copies.count == 1
        calls = [piece.ragged for piece in pieces]
        bounds = [(call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()) for call in calls]
        assert bounds == [([0, 4], [0, each + 1]) for each in range(number)]
        assert {call.cu_seqlens_k.dtype for call in calls} == {torch.int32}


class CopiesOnTheHost(TorchDispatchMode):
    """Copies to a device, counted, stay where their values can be read."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._to_copy.default:
            return func(*args, **(kwargs or {}))
        assert kwargs["non_blocking"], "the host waits for it"
        self.count += 1
        return args[0].clone()
