"""New rows over stored ones, against a plain softmax over the keys that each query sees, named one by one.

U new rows, N query heads, K key/value heads, H head dim, C slots of the store.
"""

import dataclasses
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.kernels.cached import Lanes, attention_in_lanes
from radixtrain.kernels.cpu_loops import EagerKernel, LoopingKernel, TorchCPUKernel
from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book
from radixtrain.tree.cached_layout import shared_piece, shared_pieces

CPU, INF = torch.device("cpu"), float("inf")
NUM_SLOTS, HEAD_DIM = 40, 8
SCALE = HEAD_DIM**-0.5
kernels = pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])
HEADS = [(2, 2), (4, 2), (4, 1)]
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)

# Slots of a store: lanes from slot 16 on, filled to these lengths, and rows that several queries share.
FIRST, STEP = 16, 6
FILLED = [3, 6, 1, 4]
SHARED = {  # name: queries and slots; each a slice if its numbers follow each other
    "slices": [([0, 1, 2, 3], [2, 3, 4]), ([1, 2], [7, 8])],
    "index tensors": [([0, 2, 3], [5, 2, 9, 1]), ([3, 1], [12, 10])],
    "both": [([0, 1], [5, 2, 9]), ([3, 0], [10, 11, 12]), ([2], [0])],
    "nothing": [],
}


class Stored(NamedTuple):
    """q: (U, N, H). k, v: (C, K, H)."""

    q: Tensor
    k: Tensor
    v: Tensor

    def to(self, dtype: torch.dtype) -> "Stored":
        return Stored(*(each.to(dtype) for each in self))


def stored(num_rows: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64) -> Stored:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, heads[0]), *[(NUM_SLOTS, heads[1])] * 2]
    tensors = (torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64) for shape in shapes)
    return Stored(*tensors).to(dtype)


def seen_in_lanes(shared: list[tuple[list[int], list[int]]]) -> Tensor:
    """(U, C), bool."""
    seen = torch.zeros(len(FILLED), NUM_SLOTS, dtype=torch.bool)
    for lane, length in enumerate(FILLED):
        start = FIRST + STEP * lane
        seen[lane, start : start + length] = True
    return with_shared(seen, shared)


def with_shared(seen: Tensor, shared: list[tuple[list[int], list[int]]]) -> Tensor:
    for queries, slots in shared:
        assert not seen[queries][:, slots].any(), "no query sees a key twice"
        seen[np.ix_(queries, slots)] = True
    return seen


def lanes(lengths: list[int] = FILLED) -> Lanes:
    places = torch.arange(max(lengths))
    mask = torch.zeros(len(lengths), max(lengths)).masked_fill(places >= torch.tensor(lengths)[:, None], -INF)
    return Lanes(FIRST, STEP, mask)


def pieces(shared: list[tuple[list[int], list[int]]]) -> list[Piece]:
    return [shared_piece(queries, np.array(slots), CPU) for queries, slots in shared]


def plain(each: Stored, seen: Tensor, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """One softmax over all that a query sees."""
    q, k, v = each
    scores = torch.einsum("ukgh,ckh->kguc", q.unflatten(1, (k.shape[1], -1)), k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -INF).flatten(0, 1)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)].unflatten(0, (k.shape[1], -1))
    return torch.einsum("kguc,ckh->ukgh", weights, v).flatten(1, 2)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


class TestLanes:
    @kernels
    @pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
    def test_against_plain_softmax(self, kernel: LoopingKernel, shared: list) -> None:
        for heads, sinks in product(HEADS, (None, SINKS)):
            each, own = stored(len(FILLED), heads), None if sinks is None else sinks[: heads[0]]
            found = attention_in_lanes(each.q, each[1:], lanes(), pieces(shared), kernel, Scoring(SCALE), own)
            close(found, plain(each, seen_in_lanes(shared), sinks=own))

    @kernels
    def test_queries_in_another_order(self, kernel: LoopingKernel) -> None:
        """Lanes 2 0 3 1 in sorted order, in which the readers of shared rows are neighbours: rectangles of one call."""
        each, order = stored(len(FILLED)), torch.tensor([2, 0, 3, 1])
        shared = [([2, 0, 3], [2, 3, 4]), ([2, 0], [7, 8]), ([3, 1], [10, 11, 12])]
        runs = [
            (np.array(rows), np.array(slots))
            for rows, (_, slots) in zip(([0, 1, 2], [0, 1], [2, 3]), shared, strict=True)
        ]
        ordered = dataclasses.replace(lanes(), order=order, inverse=order.argsort())
        pieces = shared_pieces(runs, CPU)
        assert len(pieces) == 2
        for sinks in (None, SINKS):
            found = attention_in_lanes(each.q, each[1:], ordered, pieces, kernel, Scoring(SCALE), sinks)
            close(found, plain(each, seen_in_lanes(shared), sinks=sinks))

    @kernels
    def test_hidden_rows_change_nothing(self, kernel: LoopingKernel) -> None:
        """As long as they are finite, as `Lanes` says."""
        each, shared = stored(len(FILLED)), SHARED["slices"]
        before = attention_in_lanes(each.q, each[1:], lanes(), pieces(shared), kernel, Scoring(SCALE))
        unseen = ~seen_in_lanes(shared).any(0)
        for rows in each[1:]:
            rows[unseen] = 1e3
        after = attention_in_lanes(each.q, each[1:], lanes(), pieces(shared), kernel, Scoring(SCALE))
        assert unseen[19:22].all()
        close(after, before)

    @kernels
    def test_narrow_dtypes(self, kernel: LoopingKernel) -> None:
        shared = SHARED["both"]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            each, seen = stored(len(FILLED), dtype=dtype), seen_in_lanes(shared)
            found = attention_in_lanes(each.q, each[1:], lanes(), pieces(shared), kernel, Scoring(SCALE))
            assert found.dtype == dtype
            by_the_book = flash_attention_by_the_book(*each, torch.zeros_like(each.q), seen, SCALE)[0]
            assert_within_reference_error(found, by_the_book, plain(each.to(torch.float64), seen))


class OneCall:
    """A kernel that does not loop, such as flash_attn: eager inside. calls: queries and keys of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: object, scoring: Scoring) -> tuple[Tensor, Tensor]:
        self.calls.append((len(q), len(k)))
        return EagerKernel().forward(q, k, v, ragged, scoring)


def test_lanes_of_a_kernel_that_does_not_loop_are_eager() -> None:
    each, shared, kernel = stored(len(FILLED)), SHARED["both"], OneCall()
    found = attention_in_lanes(each.q, each[1:], lanes(), pieces(shared), kernel, Scoring(SCALE))
    close(found, plain(each, seen_in_lanes(shared)))
    assert kernel.calls == [(2, 3), (2, 3), (1, 1)], "only the shared rows are its own"
