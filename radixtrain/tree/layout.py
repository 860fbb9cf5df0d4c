"""The prefix plan as two tensors, from which attention reads what it launches.

`host`, int64, stays on the CPU: how long each section of `rows` is, and the numbers that a launch needs. `rows`, int32,
goes to the device: bounds and indices, section after section. Both are made in the DataLoader worker, so that a batch
is moved by one copy, nothing is read back, and a compiled graph holds two tensors and no number of the tree.

T packed tokens, U unique rows, B sequences, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.kernels.merge_attention import Piece, Rows
from radixtrain.kernels.varlen_args import Ragged
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.chains import Entry, cascade
from radixtrain.tree.plan import PrefixPlan

OF_PLAN = ("gather_indices", "inverse_indices", "cu_seqlens", "segment_starts", "subtree_ends")
OF_PATHS = ("path_keys", "path_cu_seqlens_q", "path_cu_seqlens_k")
SECTIONS = (*OF_PLAN, *OF_PATHS, "calls", "block_of_row", "block_queries")
BOUNDS = ("cu_seqlens", *OF_PATHS[1:])  # sections whose longest entry is known on the host
WIDTH = 7  # numbers of a call
Function = Callable[[Tensor], Tensor]


class _Host(NamedTuple):
    """The lists in `host`, each after its length.

    lengths: of the sections. longest: entry of each of `BOUNDS`. max_position: the largest position id, without padding
    rows; 0 if there is no row. calls: `WIDTH` numbers each. blocks: the lengths of a `BlockLayout`. parents, starts: of
    the segments.
    """

    lengths: list[int]
    longest: list[int]
    max_position: list[int]
    calls: list[int]
    blocks: list[int]
    parents: list[int]
    starts: list[int]


def _section(name: str, dtype: torch.dtype = torch.int64) -> Any:
    """Make a property: a section of `rows`. int32 is free; int64, for indices, is one copy of all sections."""
    return cached_property(lambda layout: layout.section(name, dtype))


class Movable:
    """What moves as a tensor does: loaders, Accelerate, Lightning and `x.to(device)` find the methods.

    `map` replaces the tensors that move. Whatever else the object holds stays where it is.
    """

    def map(self, function: Function) -> Self:
        """Replace what moves; return the object itself if nothing changes."""
        raise NotImplementedError

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> Self:
        """Move to a device.

        non_blocking: as of `Tensor.to`. By default no copy is waited for, except to where the host could read before
            the copy has arrived; Lightning relies on that.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type not in ("cpu", "mps")
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy into page-locked memory of the host, from which copies to a GPU are asynchronous."""
        return self.map(Tensor.pin_memory)


class TreeLayout(Movable):
    """A `PrefixPlan` on a device.

    host: int64, on the CPU. rows: int32, on the device.

    The sections of `rows`, as in the plan:

    gather_indices (U), inverse_indices (T), path_keys (T'): int64.
    cu_seqlens (B+1), segment_starts (S+1), subtree_ends (S): int32.
    """

    host: Tensor
    rows: Tensor

    gather_indices = _section("gather_indices")
    inverse_indices = _section("inverse_indices")
    path_keys = _section("path_keys")
    cu_seqlens = _section("cu_seqlens", torch.int32)
    segment_starts = _section("segment_starts", torch.int32)
    subtree_ends = _section("subtree_ends", torch.int32)

    def __init__(self, host: Tensor, rows: Tensor) -> None:
        self.host, self.rows = host, rows

    @classmethod
    def from_plan(cls, plan: PrefixPlan, blocks: BlockLayout | None = None) -> TreeLayout:
        """Encode a plan, on the CPU. Runs in the DataLoader worker.

        blocks: of its rows, if any attend in both directions.
        """
        calls = cascade(*(x.tolist() for x in (plan.segment_starts, plan.segment_parents, plan.subtree_ends)))
        numbers, call_rows = _encoded_calls(calls)
        of_blocks = (blocks.block_of_row.numpy(), blocks.queries.numpy()) if blocks else (NO_ROWS, NO_ROWS)
        of_plan = [getattr(plan, name) for name in (*OF_PLAN, *OF_PATHS)]
        sections = dict(zip(SECTIONS, (*of_plan, call_rows, *of_blocks), strict=True))
        lists = _Host(
            lengths=[len(section) for section in sections.values()],
            longest=[_longest(sections[name]) for name in BOUNDS],
            max_position=[int(plan.position_ids[: plan.num_unique_tokens].max(initial=0))],
            calls=numbers,
            blocks=list(blocks.lengths) if blocks else [],
            parents=plan.segment_parents.tolist(),
            starts=plan.segment_starts.tolist(),
        )
        host = [number for each in lists for number in (len(each), *each)]
        rows = np.concatenate([*sections.values()]).astype(np.int32)
        with _disable_current_modes():  # a mode that fakes tensors would lose what they hold
            host_tensor = torch.tensor(host, dtype=torch.int64, device="cpu")
        return cls(host_tensor, torch.from_numpy(rows))

    def map(self, function: Function) -> TreeLayout:
        """Replace `rows`; return the layout itself if nothing changes. `host` stays where it is."""
        rows = function(self.rows)
        return self if rows is self.rows else TreeLayout(self.host, rows)

    @cached_property
    def _host(self) -> _Host:
        with _disable_current_modes():
            numbers = iter(self.host.tolist())
        return _Host(*(list(islice(numbers, length)) for length in numbers))

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self._host.lengths)]

    @cached_property
    def _wide(self) -> Tensor:
        return self.rows.long()

    def section(self, name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a section of `rows`, as int64 or int32."""
        index = SECTIONS.index(name)
        rows = self.rows if dtype == torch.int32 else self._wide
        return rows[self._bounds[index] : self._bounds[index + 1]]

    @cached_property
    def num_rows(self) -> int:
        return self._host.lengths[0]

    @cached_property
    def max_seqlen(self) -> int:
        """Return the tokens of the longest sequence."""
        return self._host.longest[BOUNDS.index("cu_seqlens")]

    @property
    def max_position(self) -> int:
        """Return the largest position id, without padding rows; 0 if there is no row."""
        return self._host.max_position[0]

    @cached_property
    def num_sequences(self) -> int:
        return self._host.lengths[SECTIONS.index("cu_seqlens")] - 1

    @property
    def num_tokens(self) -> int:
        return self._host.lengths[SECTIONS.index("inverse_indices")]

    @property
    def shares(self) -> bool:
        """Return whether some row stands for several tokens. Padding adds rows."""
        return len(self._host.calls) > WIDTH or self.num_rows < self.num_tokens

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Return (B, L), the shape of the ids in an ordinary batch; wider if the rows with their padding need it."""
        return self.num_sequences, max(self.max_seqlen, -(-self.num_rows // self.num_sequences))

    @cached_property
    def device(self) -> torch.device:
        return self.rows.device

    @cached_property
    def row_subtree_ends(self) -> Tensor:
        """Return the tree mask as (U,), int32: query q sees key k iff `k <= q < row_subtree_ends[k]`."""
        return self.subtree_ends.repeat_interleave(self.segment_starts.diff(), output_size=self.num_rows)

    @cached_property
    def row_depths(self) -> Tensor:
        """Return the place of each row in its sequence, (U,), int64, from 0, whatever its position id; padding too."""
        return self.gather_indices - self.cu_seqlens[sequences_of(self.gather_indices, self.cu_seqlens)]

    @cached_property
    def ways(self) -> dict[Any, Any]:
        """Return what computes the attention of layers, by what they ask for; filled by `tree_attention`."""
        return {}

    @cached_property
    def even_shape(self) -> tuple[int, int] | None:
        """Return the number of sequences and their length if they share nothing and are equally long; None otherwise.

        None for a single sequence on a GPU, since its length is new in every batch: torch may take cuDNN, which plans
        each shape for a tenth of a second. Equal lengths come again.
        """
        batch = self.num_sequences, self.max_seqlen
        is_even = self.num_rows == self.num_tokens == batch[0] * batch[1] > 0 and not self.shares
        return batch if is_even and (batch[0] > 1 or self.device.type == "cpu") else None

    @cached_property
    def sequences(self) -> Piece:
        """Return the call of `expand`: the packed sequences onto themselves, causal."""
        return self._causal_sections("cu_seqlens", "cu_seqlens")

    @cached_property
    def paths(self) -> Piece:
        """Return the call of `path`: new rows of each sequence onto its root path, causal."""
        return self._causal_sections(*OF_PATHS[1:])

    def onto_paths(self, piece: Piece) -> Piece:
        """Replace the keys of a piece, given by an index tensor, by their copies in `path_keys`.

        A row has a copy in the path that brings it, whose last copies are the rows that it brings.
        """
        of_q, of_k = (self.section(name) for name in OF_PATHS[1:])
        assert isinstance(piece.k_rows, Tensor)
        moved = (of_k - of_q)[1:][sequences_of(piece.k_rows, of_q)]
        return replace(piece, k_rows=piece.k_rows + moved)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the calls of `cascade`; the first, of chains onto themselves, covers every row."""
        at = 0

        def taken(number: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            at += number
            return self.section("calls", dtype)[at - number : at]

        def side(entries: int, number: int, longest: int, first: int) -> tuple[Rows, Tensor, int]:
            bounds = taken(entries + 1, torch.int32)
            return slice(first, first + number) if first >= 0 else taken(number, torch.int64), bounds, longest

        pieces: list[Piece] = []
        numbers = iter(self._host.calls)
        for entries, *sides in zip(*[numbers] * WIDTH, strict=True):
            q_rows, cu_q, max_q = side(entries, *sides[:3])
            k_rows, cu_k, max_k = side(entries, *sides[3:])
            pieces.append(Piece(q_rows, k_rows, Ragged(cu_q, cu_k, max_q, max_k, causal=not pieces)))
        return tuple(pieces)

    def _causal_sections(self, q: str, k: str) -> Piece:
        of_q, of_k = (self.section(name, torch.int32) for name in (q, k))
        longest_q, longest_k = (self._host.longest[BOUNDS.index(name)] for name in (q, k))
        return Piece(slice(None), slice(None), Ragged(of_q, of_k, longest_q, longest_k, causal=True))

    @cached_property
    def blocks(self) -> BlockLayout | None:
        """Return the blocks of rows that attend in both directions; None without any."""
        lengths = self._host.blocks
        if not lengths:
            return None
        queries = self.section("block_queries")
        return BlockLayout(
            block_of_row=self.section("block_of_row"), queries=queries, keys=queries + 1, lengths=tuple(lengths)
        )

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """Return `segment_starts` (S+1,) and `segment_parents` (S,) of the plan, int64, on the host."""
        return np.array(self._host.starts), np.array(self._host.parents, dtype=np.int64)


NO_ROWS = np.zeros(0, dtype=np.int64)


def on_device(values: IntArray, device: torch.device) -> Tensor:
    """Copy to a device without waiting: CUDA has copied pageable memory aside when `to` returns."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def sequences_of(token_indices: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return which sequence each packed token belongs to, int64, in the shape of `token_indices`."""
    return torch.bucketize(token_indices, cu_seqlens[1:].to(token_indices.dtype), right=True)


def _encoded_calls(calls: Sequence[Sequence[Entry]]) -> tuple[list[int], IntArray]:
    """Return the numbers of the calls, and their bounds and indices. Rows that follow each other need no indices.

    Numbers: of entries, and then for queries and for keys: of rows, the longest entry, the first row, -1 for indices.
    """
    numbers: list[int] = []
    rows: list[IntArray] = []
    for entries in calls:
        q0, q1, k0, k1 = np.array(entries, dtype=np.int64).reshape(-1, 4).T
        numbers.append(len(entries))
        for starts, lengths in ((q0, q1 - q0), (k0, k1 - k0)):
            bounds = cumulative(lengths)
            first = int(starts[0]) if len(starts) else 0
            is_slice = bool((starts - first == bounds[:-1]).all())
            numbers += [int(bounds[-1]), _longest(bounds), first if is_slice else -1]
            rows += [bounds] if is_slice else [bounds, concatenate_ranges(starts, lengths)]
    return numbers, np.concatenate(rows)


def _longest(bounds: np.ndarray) -> int:
    return int(np.diff(bounds).max(initial=0))
