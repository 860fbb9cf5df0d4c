"""New rows over stored ones, against a plain softmax over the keys that each query sees, named one by one.

U new rows, N query heads, K key/value heads, H head dim, C slots of the store.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from one_softmax import assert_exact, by_the_book, one_softmax, random_tensors
from torch import Tensor

from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.lanes import Lanes, attention_in_lanes
from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import assert_within_reference_error
from radixtrain.tree.shared_pieces import shared_piece, shared_pieces

CPU = torch.device("cpu")
NUM_SLOTS, SCALE = 40, 8**-0.5
HEADS = [(2, 2), (4, 2), (4, 1)]
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)
Shared = Sequence[tuple[list[int], list[int]]]

# Slots of a store: lanes from slot 16 on, filled to these lengths, and rows that several queries share.
FIRST, STEP = 16, 6
FILLED = [3, 6, 1, 4]
SHARED: dict[str, Shared] = {  # name: queries and slots; each a slice if its numbers follow each other
    "slices": [([0, 1, 2, 3], [2, 3, 4]), ([1, 2], [7, 8])],
    "index tensors": [([0, 2, 3], [5, 2, 9, 1]), ([3, 1], [12, 10])],
    "both": [([0, 1], [5, 2, 9]), ([3, 0], [10, 11, 12]), ([2], [0])],
    "nothing": [],
}


def seen_in_lanes(shared: Shared) -> Tensor:
    """(U, C): 0 for a slot that a query sees, else -1."""
    seen = torch.full((len(FILLED), NUM_SLOTS), -1)
    for lane, length in enumerate(FILLED):
        start = FIRST + STEP * lane
        seen[lane, start : start + length] = 0
    for queries, slots in shared:
        assert (seen[queries][:, slots] < 0).all(), "no query sees a key twice"
        seen[np.ix_(queries, slots)] = 0
    return seen


def stored(seen: Tensor, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q: (U, N, H). k, v: (C, K, H). What no query sees is large, but finite, as `Lanes` says."""
    q, k, v, _ = random_tensors((len(FILLED), NUM_SLOTS), dtype, heads)
    unseen = (seen < 0).all(0)
    assert unseen[19:22].all()
    for each in (k, v):
        each[unseen] = 1e3
    return [q, k, v]


def lanes() -> Lanes:
    hidden = torch.arange(max(FILLED)) >= torch.tensor(FILLED)[:, None]
    return Lanes(FIRST, STEP, torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")))


def pieces(shared: Shared) -> list[Piece]:
    return [shared_piece(queries, np.array(slots)) for queries, slots in shared]


class OneCall:
    """A kernel that does not loop, such as flash_attn: eager inside. calls: queries and keys of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: object, scoring: Scoring) -> tuple[Tensor, Tensor]:
        self.calls.append((len(q), len(k)))
        return EagerKernel().forward(q, k, v, ragged, scoring)


kernels = pytest.mark.parametrize("kernel", [EagerKernel, TorchCPUKernel, OneCall])


@kernels
@pytest.mark.parametrize("name", SHARED)
def test_against_plain_softmax(kernel: type, name: str) -> None:
    seen = seen_in_lanes(SHARED[name])
    for heads, sinks in product(HEADS, (None, SINKS)):
        (q, *store), own = stored(seen, heads), None if sinks is None else sinks[: heads[0]]
        used = kernel()
        found = attention_in_lanes(q, store, lanes(), pieces(SHARED[name]), used, Scoring(SCALE), own)
        assert_exact([found], [one_softmax(q, *store, own, distances=seen)], heads)
        if kernel is OneCall and name == "both":
            assert used.calls == [(2, 3), (2, 3), (1, 1)], "only the shared rows are its own; lanes are eager"


@kernels
def test_queries_in_another_order(kernel: type) -> None:
    """Lanes 2 0 3 1 in sorted order, in which the readers of shared rows are neighbours: rectangles of one call."""
    order = torch.tensor([2, 0, 3, 1])
    shared = [([2, 0, 3], [2, 3, 4]), ([2, 0], [7, 8]), ([3, 1], [10, 11, 12])]
    sorted_rows = ([0, 1, 2], [0, 1], [2, 3])
    runs = [(np.array(rows), np.array(slots)) for rows, (_, slots) in zip(sorted_rows, shared, strict=True)]
    ordered, together = replace(lanes(), order=order, inverse=order.argsort()), shared_pieces(runs, CPU)
    assert len(together) == 2
    seen = seen_in_lanes(shared)
    q, *store = stored(seen)
    for sinks in (None, SINKS):
        found = attention_in_lanes(q, store, ordered, together, kernel(), Scoring(SCALE), sinks)
        assert_exact([found], [one_softmax(q, *store, sinks, distances=seen)])


@kernels
def test_narrow_dtypes(kernel: type) -> None:
    seen = seen_in_lanes(SHARED["both"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, *store = stored(seen, dtype=dtype)
        found = attention_in_lanes(q, store, lanes(), pieces(SHARED["both"]), kernel(), Scoring(SCALE))
        assert found.dtype == dtype
        truth = one_softmax(*(x.double() for x in (q, *store)), distances=seen)
        assert_within_reference_error(found, by_the_book([q, *store, torch.ones_like(q)], seen, SCALE)[0], truth)
