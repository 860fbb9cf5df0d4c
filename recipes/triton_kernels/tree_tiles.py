"""Which tiles of the tree mask hold anything: the lists that a tiled attention kernel walks, made once on the host.

U rows. A tile is a block of queries times a block of keys. A program holds one of I blocks of rows and walks other
blocks, smaller ones: the forward and dq hold queries and walk keys, dk and dv hold keys and walk queries. Query q sees
key k iff `k <= q < subtree_ends[k]`, and every row sees itself. So the queries that see a block of keys lie in one run
of blocks: from the one with the first key to the one with the last query below any of the keys. A tile is full if every
query of it sees every key. The full tiles are a run in that run: from after the last key to the first end of a subtree.

    subtree_ends  6 6 3 4 6 6     held = walked = 2   keys 0-1        keys 2-3        keys 4-5
    row 0  x                      queries 0-1         partial
    row 1  x x                    queries 2-3         full            partial
    row 2  x x x                  queries 4-5         full                            partial
    row 3  x x . x
    row 4  x x . . x              query_runs          0 3, full 1 3   1 2, full 2 2   2 3, full 3 3
    row 5  x x . . x x

NumPy makes them, in time linear in U and in the number of tiles that hold something.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixtrain.tree.layout import TreeLayout

__all__ = ["TreeTiles", "tile_sizes", "tiles_of", "tree_tiles"]


@dataclass(frozen=True, eq=False)
class TreeTiles:
    """Tensors are int32.

    subtree_ends: (U,). one past the last descendant of each row's segment.
    key_starts: (I+1,). held block i of queries sees the walked blocks `key_blocks[key_starts[i] : key_starts[i+1]]`.
    num_full: (I,). how many of those tiles are full; they come first.
    key_blocks: (M,). ascending among the full tiles of a held block, and among the others.
    query_runs: (I, 4). held block i of keys is seen by the walked blocks of queries from [i, 0] up to [i, 1]; the tiles
        from [i, 2] up to [i, 3] are full.
    held, walked: rows of a block.
    """

    subtree_ends: Tensor
    key_starts: Tensor
    num_full: Tensor
    key_blocks: Tensor
    query_runs: Tensor
    held: int
    walked: int

    @property
    def num_rows(self) -> int:
        return self.subtree_ends.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeTiles:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()}
        return replace(self, **moved)


def tile_sizes(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """The largest `held` and `walked` that fit the registers, and the 99 KiB of shared memory of smaller GPUs.

    Where an H100 takes more for them, it has it: 131,328 bytes in bfloat16 and head dim 128.
    """
    if dtype.itemsize > 2:
        return (32, 16) if head_dim <= 128 else (16, 16)
    return (128, 64) if head_dim <= 128 else (64, 16)


_TILES: WeakKeyDictionary[TreeLayout, dict[tuple[int, int], TreeTiles]] = WeakKeyDictionary()


def tiles_of(layout: TreeLayout, q: Tensor) -> TreeTiles:
    """The lists for q (U, N, H), made by the first call for a layout, which waits for the device."""
    sizes, made = tile_sizes(q.shape[2], q.dtype), _TILES.setdefault(layout, {})
    if sizes not in made:
        made[sizes] = tree_tiles(layout.row_subtree_ends.cpu().numpy(), *sizes).to(q.device)
    return made[sizes]


def tree_tiles(row_subtree_ends: npt.ArrayLike, held: int, walked: int) -> TreeTiles:
    """The lists of a tree mask, on CPU.

    row_subtree_ends: (U,), integer. as in a `PrefixPlan`, whose padding rows are a tree of their own.
    ValueError if a row does not see itself, or an end is past the last row.
    """
    ends = np.asarray(row_subtree_ends, dtype=np.int64)
    num_rows = len(ends)
    outside = np.flatnonzero((ends <= np.arange(num_rows)) | (ends > num_rows))
    if len(outside):
        row = int(outside[0])
        raise ValueError(f"tree_tiles: subtree_ends[{row}] must lie in [{row + 1}, {num_rows}], got {ends[row]}")
    first, last, first_full, last_full = _query_runs(ends, block_q=held, block_k=walked).T
    queries, keys = _ranges(first, last - first), np.arange(len(first)).repeat(last - first)
    full = (queries >= first_full[keys]) & (queries < last_full[keys])
    order = np.argsort(2 * queries + ~full, kind="stable")  # by block of queries, the full tiles first
    num_blocks = -(-num_rows // held)
    return TreeTiles(
        subtree_ends=_int32(ends),
        key_starts=_int32(np.append(0, np.cumsum(np.bincount(queries, minlength=num_blocks)))),
        num_full=_int32(np.bincount(queries[full], minlength=num_blocks)),
        key_blocks=_int32(keys[order]),
        query_runs=_int32(_query_runs(ends, block_q=walked, block_k=held)),
        held=held,
        walked=walked,
    )


def _query_runs(ends: npt.NDArray[np.int64], block_q: int, block_k: int) -> npt.NDArray[np.int64]:
    """For every block of keys the run of blocks of queries that see it, and the full run in it, which may be empty."""
    keys = np.arange(0, len(ends), block_k)
    if not len(keys):
        return np.zeros((0, 4), dtype=np.int64)
    first, last = keys // block_q, -(-np.maximum.reduceat(ends, keys) // block_q)
    first_full = np.minimum(-(-(keys + block_k - 1) // block_q), last)
    last_full = np.maximum(np.minimum.reduceat(ends, keys) // block_q, first_full)
    return np.stack([first, last, first_full, last_full], axis=1)


def _int32(array: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The ranges [start, start + length) back to back."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + (starts - before).repeat(lengths)
