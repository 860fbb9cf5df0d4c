"""The prefix plan as tensors, which travel in a batch to the device, where the attention strategies read them.

T packed tokens, U unique rows, B sequences, S segments, P predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from radixtrain.kernels.cascade import Level, bundled_pieces
from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.tree_flex import tree_block_mask
from radixtrain.kernels.varlen_args import Ragged
from radixtrain.tree.arrays import concatenate_ranges
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.movable import Movable
from radixtrain.tree.plan import PrefixPlan
from radixtrain.tree.runs import RunCost, RunLayout, cheapest_runs


@dataclass(frozen=True, eq=False)
class TreeLayout(Movable):
    """A `PrefixPlan` on a device.

    gather_indices (U): int64, as in the plan.
    inverse_indices (T), path_keys (T'), cu_seqlens (B+1), segment_starts (S+1), subtree_ends (S),
    path_cu_seqlens_q/k (E+1): int32.
    max_seqlen, max_segment, max_new_tokens, max_path: longest sequence, segment, run of new rows, path; in tokens.
    max_position: largest position id, without padding rows; 0 if there is no row.
    levels: one `Level` for each level of the tree that has descendants.
    level_queries, level_keys: int64. rows of the levels with several segments, back to back (single ones are slices).
    level_cu_seqlens_q, level_cu_seqlens_k: int32. bounds of the same calls, back to back, each from 0.
    runs: for layers with a recurrent state, if requested.
    blocks: rows that attend in both directions, if there are any.
    """

    gather_indices: Tensor
    inverse_indices: Tensor
    cu_seqlens: Tensor
    segment_starts: Tensor
    subtree_ends: Tensor
    path_keys: Tensor
    path_cu_seqlens_q: Tensor
    path_cu_seqlens_k: Tensor
    level_queries: Tensor
    level_keys: Tensor
    level_cu_seqlens_q: Tensor
    level_cu_seqlens_k: Tensor
    max_seqlen: int
    max_segment: int
    max_new_tokens: int
    max_path: int
    max_position: int
    levels: tuple[Level, ...]
    runs: RunLayout | None = None
    blocks: BlockLayout | None = None

    @classmethod
    def from_plan(
        cls, plan: PrefixPlan, run_cost: RunCost | None = None, blocks: BlockLayout | None = None
    ) -> TreeLayout:
        """Copy a plan to CPU tensors. Runs in the DataLoader worker.

        run_cost: None, or the cost of the model's recurrent layers, by which their runs are chosen.
        blocks: of its rows, if any attend in both directions.
        """
        segments = plan.segment_starts, plan.segment_parents
        return cls(
            gather_indices=_int64(plan.gather_indices),
            inverse_indices=_int32(plan.inverse_indices),
            cu_seqlens=_int32(plan.cu_seqlens),
            segment_starts=_int32(plan.segment_starts),
            subtree_ends=_int32(plan.subtree_ends),
            path_keys=_int32(plan.path_keys),
            path_cu_seqlens_q=_int32(plan.path_cu_seqlens_q),
            path_cu_seqlens_k=_int32(plan.path_cu_seqlens_k),
            max_seqlen=_longest(plan.cu_seqlens),
            max_segment=_longest(plan.segment_starts),
            max_new_tokens=_longest(plan.path_cu_seqlens_q),
            max_path=_longest(plan.path_cu_seqlens_k),
            max_position=int(plan.position_ids[: plan.num_unique_tokens].max(initial=0)),
            runs=None if run_cost is None else cheapest_runs(*segments, run_cost),
            blocks=blocks,
            **_levels(plan),
        )

    @property
    def num_rows(self) -> int:
        return self.gather_indices.shape[0]

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Return (B, L), the shape of the ids in an ordinary batch; wider if the rows with their padding need it."""
        num_sequences = self.cu_seqlens.shape[0] - 1
        return num_sequences, max(self.max_seqlen, -(-self.num_rows // num_sequences))

    @property
    def device(self) -> torch.device:
        return self.gather_indices.device

    @cached_property
    def row_subtree_ends(self) -> Tensor:
        """Return the tree mask as (U,), int32: query q sees key k iff `k <= q < row_subtree_ends[k]`."""
        lengths = self.segment_starts.diff()
        return self.subtree_ends.repeat_interleave(lengths, output_size=self.num_rows)

    @cached_property
    def row_depths(self) -> Tensor:
        """Return the place of each row in its sequence, (U,), int64, from 0, whatever its position id; padding too."""
        return self.gather_indices - self.cu_seqlens[sequences_of(self.gather_indices, self.cu_seqlens)]

    @cached_property
    def _block_masks(self) -> dict[int | None, BlockMask]:
        return {}

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return the tree mask for FlexAttention, made when the first layer asks. window: None, or one that binds."""
        if window not in self._block_masks:
            depths = None if window is None else self.row_depths
            self._block_masks[window] = tree_block_mask(self.row_subtree_ends, depths, window)
        return self._block_masks[window]

    @cached_property
    def even_shape(self) -> tuple[int, int] | None:
        """Return the number of sequences and their length if they share nothing and are equally long; None otherwise.

        None for a single sequence on a GPU, since its length is new in every batch: torch may take cuDNN, which plans
        each shape for a tenth of a second. Equal lengths come again.
        """
        batch = self.cu_seqlens.shape[0] - 1, self.max_seqlen
        is_even = self.num_rows == self.inverse_indices.shape[0] == batch[0] * batch[1] > 0
        return batch if is_even and not self.levels and (batch[0] > 1 or self.device.type == "cpu") else None

    @cached_property
    def sequences(self) -> Ragged:
        """Return the call of `expand`: the packed sequences onto themselves, causal."""
        bounds = _host_bounds(self.cu_seqlens, self.cu_seqlens)
        return Ragged(self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen, True, bounds)

    @cached_property
    def paths(self) -> Ragged:
        """Return the call of `path`: new rows of each sequence onto its root path, causal."""
        cu_seqlens = self.path_cu_seqlens_q, self.path_cu_seqlens_k
        return Ragged(*cu_seqlens, self.max_new_tokens, self.max_path, True, _host_bounds(*cu_seqlens))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the calls of `cascade`; the first covers every row."""
        if self.device.type == "cpu":
            return bundled_pieces(self.segment_starts, self.subtree_ends, self.row_subtree_ends)
        return self.packed_pieces()

    @cached_property
    def separate_pieces(self) -> tuple[Piece, ...]:
        """Return the calls of `cascade` on the host, without a mask that hides one branch from another."""
        return bundled_pieces(self.segment_starts, self.subtree_ends, self.row_subtree_ends, bundle=1)

    def packed_pieces(self) -> tuple[Piece, ...]:
        """Return the calls of `cascade` on a device: one for all segments, and one for each level of the tree."""
        own = Ragged(self.segment_starts, self.segment_starts, self.max_segment, self.max_segment, causal=True)
        return (Piece(slice(None), slice(None), own), *self._level_pieces())

    def _level_pieces(self) -> Iterator[Piece]:
        """Yield the calls of descendants onto their ancestors, one for each level of the tree."""
        entry = query = key = 0
        for level in self.levels:
            bounds = slice(entry, entry + level.num_entries + 1)
            entry += level.num_entries + 1
            cu_seqlens = self.level_cu_seqlens_q[bounds], self.level_cu_seqlens_k[bounds]
            ragged = Ragged(*cu_seqlens, level.max_seqlen_q, level.max_seqlen_k, causal=False)
            q_rows: slice | Tensor = slice(level.first_query, level.first_query + level.num_queries)
            k_rows: slice | Tensor = slice(level.first_key, level.first_key + level.num_keys)
            if level.num_entries > 1:
                q_rows, query = self.level_queries[query : query + level.num_queries], query + level.num_queries
                k_rows, key = self.level_keys[key : key + level.num_keys], key + level.num_keys
            yield Piece(q_rows, k_rows, ragged)


def sequences_of(token_indices: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return which sequence each packed token belongs to, int64, in the shape of `token_indices`."""
    return torch.bucketize(token_indices, cu_seqlens[1:].to(token_indices.dtype), right=True)


def _levels(plan: PrefixPlan) -> dict[str, Any]:
    """Compute the cascade's calls of a plan: fields `levels` and `level_*` of a `TreeLayout`."""
    ends = plan.segment_starts[1:]
    branching = np.flatnonzero(plan.subtree_ends > ends)
    by_level = branching[np.argsort(plan.segment_levels[branching], kind="stable")]
    num_entries = np.bincount(plan.segment_levels[branching])
    first = np.cumsum(num_entries) - num_entries
    q_starts, k_starts = ends[by_level], plan.segment_starts[by_level]
    q_lengths, k_lengths = plan.subtree_ends[by_level] - q_starts, q_starts - k_starts
    sizes = [reduce.reduceat(lengths, first) for reduce in (np.add, np.maximum) for lengths in (q_lengths, k_lengths)]
    columns = (num_entries, *sizes, q_starts[first], k_starts[first])
    several = np.repeat(num_entries > 1, num_entries)
    return {
        "levels": tuple(map(Level, *(column.tolist() for column in columns))),
        "level_queries": _int64(concatenate_ranges(q_starts[several], q_lengths[several])),
        "level_keys": _int64(concatenate_ranges(k_starts[several], k_lengths[several])),
        "level_cu_seqlens_q": _int32(_cu_seqlens_per_level(q_lengths, num_entries)),
        "level_cu_seqlens_k": _int32(_cu_seqlens_per_level(k_lengths, num_entries)),
    }


def _cu_seqlens_per_level(lengths: np.ndarray, num_entries: np.ndarray) -> np.ndarray:
    """Return the bounds of the lengths of each level, back to back, each from 0: one more than there are lengths."""
    level = np.arange(len(num_entries)).repeat(num_entries)
    ends = np.cumsum(lengths)
    before = np.concatenate([[0], ends])[np.cumsum(num_entries) - num_entries]
    bounds = np.zeros(len(lengths) + len(num_entries), dtype=np.int64)
    bounds[np.arange(len(lengths)) + level + 1] = ends - before[level]
    return bounds


def _host_bounds(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[tuple[int, int, int, int], ...] | None:
    """Return the bounds as host ints; None on a device, because reading them would wait."""
    if cu_seqlens_q.device.type != "cpu":
        return None
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))


def _longest(cu_seqlens: np.ndarray) -> int:
    return int(np.diff(cu_seqlens).max(initial=0))


def _int64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.int64, device="cpu")


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
