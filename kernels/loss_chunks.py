"""The loss in chunks: some predictor rows at a time, each chunk with the predictions that belong to its rows.

R predictor rows, P predictions, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Chunk", "chunks_of", "rows_per_chunk"]

# Rows of a chunk: a quarter of D within these bounds, so that its logits are about a quarter of the head. Each chunk
# reads the head twice and its gradient once. With few rows the three products wait for memory, even more if the head is
# larger than the caches. Their GFLOP/s, float32, one thread of a shared AMD EPYC (Zen 5), torch 2.13:
#
#     rows                    16    32    64   128   256   512
#     V = 4,096    D = 256    87    96   104   106   105   106
#     V = 32,000   D = 512    69    86    96    99   104   104
#     V = 151,936  D = 1024   60    69    87    91    98            256 rows of logits are 148 MiB
CHUNK_ROWS = (128, 256)
# More rows if the vocabulary is small, so that a chunk's twenty calls cost little beside its products: 2 MiB in
# float32, 128 rows of V = 4,096. Calls cost more on accelerators (not measured there).
MIN_CHUNK_ELEMENTS = {"cpu": 2**19, "other": 2**24}


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some predictor rows and their N predictions. It may list other predictions too, at row 0 with weight 0.

    rows: which of the R.
    places: (N,), int64, or all. which of the P predictions these are.
    labels, local_rows, loss_weights: (N,). rows are counted within the chunk.
    """

    rows: slice
    places: Tensor | slice
    labels: Tensor
    local_rows: Tensor
    loss_weights: Tensor


def chunks_of(size: int, num_rows: int, labels: Tensor, rows: Tensor, loss_weights: Tensor) -> Iterator[Chunk]:
    """Cut the R rows into chunks of `size`, and give each its predictions, which come in any order."""
    slices = [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    deal = _deal_on_host if rows.device.type == "cpu" else _deal_to_all
    return deal(slices, labels, rows, loss_weights)


def _deal_on_host(slices: list[slice], labels: Tensor, rows: Tensor, loss_weights: Tensor) -> Iterator[Chunk]:
    """To each chunk its own predictions.

    Dealing all to all took 2 % of the time at P = 16,384 and 11 % at 100,000 (V = 4,096, D = 256, 128 rows a chunk).
    """
    order = rows.argsort(stable=True)
    bounds = torch.searchsorted(rows[order], torch.tensor([0, *(taken.stop for taken in slices)])).tolist()
    for taken, (begin, end) in zip(slices, pairwise(bounds), strict=True):
        places = order[begin:end]
        yield Chunk(taken, places, labels[places], rows[places] - taken.start, loss_weights[places])


def _deal_to_all(slices: list[slice], labels: Tensor, rows: Tensor, loss_weights: Tensor) -> Iterator[Chunk]:
    """To each chunk all P: only the device knows how many are its own, and the host must not wait for it."""
    for taken in slices:
        inside = (rows >= taken.start) & (rows < taken.stop)
        yield Chunk(taken, slice(None), labels, (rows - taken.start) * inside, loss_weights * inside)


def rows_per_chunk(num_rows: int, vocab_size: int, hidden_size: int, device: torch.device) -> int:
    """About equal chunks: the last one is not small, and a single one may be half as large again.

    From 64 on a multiple of 16, which the products prefer: 208 rows took 7 % less time than 205 (Qwen3's head).
    """
    least, most = CHUNK_ROWS
    elements = MIN_CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "other"]
    wanted = max(least, min(hidden_size // 4, most), elements // vocab_size)
    size = math.ceil(num_rows / max(1, round(num_rows / wanted)))
    return max(1, size if size < 64 else math.ceil(size / 16) * 16)
