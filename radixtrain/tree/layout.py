"""The prefix plan as two tensors, from which attention reads what it launches.

`host`, int64, stays on the CPU: how long each section of `rows` is, and the numbers that a launch needs. `rows`, int32,
goes to the device: bounds and indices, section after section. Both are made in the DataLoader worker, so that a batch
is moved by one copy, nothing is read back, and a compiled graph holds two tensors and no number of the tree.

T packed tokens, U unique rows, B sequences, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Ragged
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative
from radixtrain.tree.chains import Entry, cascade
from radixtrain.tree.plan import PrefixPlan

OF_PLAN = ("gather_indices", "inverse_indices", "cu_seqlens", "segment_starts", "subtree_ends", "path_keys")
SECTIONS = (*OF_PLAN, "block_of_row")
NO_ROWS = np.zeros(0, dtype=np.int64)
Function = Callable[[Tensor], Tensor]


class _Host(NamedTuple):
    """The lists in `host`, each after its length.

    lengths: of the sections. causal: of each piece, 0 or 1. sides: of the queries of a piece and then of its keys, the
    longest entry, the first row and how many. parents, starts: of the segments. max_position: one number.
    """

    lengths: list[int]
    causal: list[int]
    sides: list[int]
    parents: list[int]
    starts: list[int]
    max_position: list[int]


class _Side(NamedTuple):
    """The queries or the keys of a piece.

    bounds: (E+1,), of its entries. indices: of the rows; empty if these follow each other, from `first` on.
    """

    bounds: IntArray
    first: int = 0
    indices: IntArray = NO_ROWS


def _section(name: str, is_wide: bool = True) -> Any:
    """Make a property: a section of `rows`, as int64, which indices have to be, or as int32."""
    place = SECTIONS.index(name)
    return cached_property(lambda layout: (layout._int64 if is_wide else layout._int32)[place])


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
    num_rows, num_tokens, num_sequences: U, T, B. max_seqlen: tokens of the longest sequence.
    max_position: the largest position id, without padding rows; 0 if there is no row.
    has_blocks: whether some rows attend in both directions.
    ways: what computes the attention of layers, by what they ask for; filled by `tree_attention`.

    The sections of `rows`, as in the plan:

    gather_indices (U), inverse_indices (T), path_keys (T'): int64.
    cu_seqlens (B+1), segment_starts (S+1), subtree_ends (S): int32.
    block_of_row (U): int64, see `from_plan`. Empty without blocks.

    Then come four for each piece: bounds and indices of its queries, bounds and indices of its keys.
    """

    gather_indices = _section("gather_indices")
    inverse_indices = _section("inverse_indices")
    cu_seqlens = _section("cu_seqlens", is_wide=False)
    segment_starts = _section("segment_starts", is_wide=False)
    subtree_ends = _section("subtree_ends", is_wide=False)
    path_keys = _section("path_keys")
    block_of_row = _section("block_of_row")

    def __init__(self, host: Tensor, rows: Tensor) -> None:
        self.host, self.rows, self.device = host, rows, rows.device
        with _disable_current_modes():
            numbers = iter(host.tolist())
        self._host = lists = _Host(*(list(islice(numbers, length)) for length in numbers))
        self.num_rows, self.num_tokens, num_bounds = lists.lengths[:3]
        self.num_sequences, self.max_seqlen = num_bounds - 1, lists.sides[0]
        (self.max_position,) = lists.max_position
        self.has_blocks = lists.lengths[SECTIONS.index("block_of_row")] > 0
        self.ways: dict[Any, Any] = {}

    @classmethod
    def from_plan(cls, plan: PrefixPlan, block_of_row: IntArray | None = None) -> TreeLayout:
        """Encode a plan, on the CPU. Runs in the DataLoader worker.

        block_of_row: (U,). the number of each row's block, in which rows attend in both directions; -1 for others.
        """
        segments = plan.segment_starts.tolist(), plan.segment_parents.tolist(), plan.subtree_ends.tolist()
        own, *others = map(_sides_of, cascade(*segments))
        sequences, new, paths = map(_Side, (plan.cu_seqlens, plan.path_cu_seqlens_q, plan.path_cu_seqlens_k))
        later = [] if block_of_row is None else _onto_later_rows(block_of_row, plan)
        causal = [(sequences, sequences), (new, paths), own]
        sides = [side for piece in (*causal, *others, *later) for side in piece]
        blocks = block_of_row if later else NO_ROWS
        of_sides = [section for bounds, _, indices in sides for section in (bounds, indices)]
        sections = [*(getattr(plan, name) for name in OF_PLAN), blocks, *of_sides]
        lists = _Host(
            lengths=[len(section) for section in sections],
            causal=[*[1] * len(causal), *[0] * len(others), *[1] * len(later)],
            sides=[number for bounds, first, _ in sides for number in (_longest(bounds), first, int(bounds[-1]))],
            parents=plan.segment_parents.tolist(),
            starts=plan.segment_starts.tolist(),
            max_position=[int(plan.position_ids[: plan.num_unique_tokens].max(initial=0))],
        )
        host = [number for each in lists for number in (len(each), *each)]
        rows = np.concatenate(sections).astype(np.int32)
        with _disable_current_modes():  # a mode that fakes tensors would lose what they hold
            host_tensor = torch.tensor(host, dtype=torch.int64, device="cpu")
        return cls(host_tensor, torch.from_numpy(rows))

    def map(self, function: Function) -> TreeLayout:
        """Replace `rows`; return the layout itself if nothing changes. `host` stays where it is."""
        rows = function(self.rows)
        return self if rows is self.rows else TreeLayout(self.host, rows)

    @cached_property
    def _int32(self) -> tuple[Tensor, ...]:
        return self.rows.split(self._host.lengths)

    @cached_property
    def _int64(self) -> tuple[Tensor, ...]:
        return self.rows.long().split(self._host.lengths)  # one copy of all sections

    @property
    def shares(self) -> bool:
        """Return whether some row stands for several tokens. Padding adds rows."""
        return not all(self._host.causal) or self.num_rows < self.num_tokens

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Return (B, L), the shape of the ids in an ordinary batch; wider if the rows with their padding need it."""
        return self.num_sequences, max(self.max_seqlen, -(-self.num_rows // self.num_sequences))

    @cached_property
    def row_subtree_ends(self) -> Tensor:
        """Return the tree mask as (U,), int32: query q sees key k iff `k <= q < row_subtree_ends[k]`."""
        return self.subtree_ends.repeat_interleave(self.segment_starts.diff(), output_size=self.num_rows)

    @cached_property
    def row_depths(self) -> Tensor:
        """Return the place of each row in its sequence, (U,), int64, from 0, whatever its position id; padding too."""
        return self.gather_indices - self.cu_seqlens[sequences_of(self.gather_indices, self.cu_seqlens)]

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
    def _pieces(self) -> list[Piece]:
        lengths, bounds = self._host.lengths, self._int32[len(SECTIONS) :: 2]
        longest, firsts, numbers = (self._host.sides[start::3] for start in range(3))
        rows = [
            self._int64[place] if lengths[place] else slice(first, first + number)
            for place, first, number in zip(range(len(SECTIONS) + 1, len(lengths), 2), firsts, numbers, strict=True)
        ]
        return [
            Piece(rows[q], rows[k], Ragged(bounds[q], bounds[k], longest[q], longest[k], causal=bool(causal)))
            for q, k, causal in zip(range(0, len(rows), 2), range(1, len(rows), 2), self._host.causal, strict=True)
        ]

    @property
    def sequences(self) -> Piece:
        """Return the piece of `expand`: the packed sequences onto themselves, causal."""
        return self._pieces[0]

    @property
    def paths(self) -> Piece:
        """Return the piece of `path`: new rows of each sequence onto its root path, causal."""
        return self._pieces[1]

    @property
    def pieces(self) -> list[Piece]:
        """Return the pieces of `cascade`; the first, of chains onto themselves, covers every row."""
        return self._pieces[2 : -2 if self.has_blocks else None]

    @property
    def later(self) -> list[Piece]:
        """Return the pieces of every row onto the later ones of its block, of `cascade` and of `path`; [] if none."""
        return self._pieces[-2:] if self.has_blocks else []

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """Return `segment_starts` (S+1,) and `segment_parents` (S,) of the plan, int64, on the host."""
        return np.array(self._host.starts), np.array(self._host.parents, dtype=np.int64)


def on_device(values: IntArray, device: torch.device) -> Tensor:
    """Copy to a device without waiting: CUDA has copied pageable memory aside when `to` returns."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def sequences_of(token_indices: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return which sequence each packed token belongs to, int64, in the shape of `token_indices`."""
    return torch.bucketize(token_indices, cu_seqlens[1:].to(token_indices.dtype), right=True)


def _sides_of(entries: Iterable[Entry]) -> tuple[_Side, _Side]:
    """Return queries and keys of the entries of a piece. Rows that follow each other are a slice."""
    q0, q1, k0, k1 = np.array(entries, dtype=np.int64).reshape(-1, 4).T
    return _ranges(q0, q1 - q0), _ranges(k0, k1 - k0)


def _ranges(starts: IntArray, lengths: IntArray) -> _Side:
    bounds = cumulative(lengths)
    first = int(starts[0]) if len(starts) else 0
    if (starts - first == bounds[:-1]).all():
        return _Side(bounds, first)
    return _Side(bounds, indices=concatenate_ranges(starts, lengths))


def _onto_later_rows(block_of_row: IntArray, plan: PrefixPlan) -> list[tuple[_Side, _Side]]:
    """Return the pieces of every row onto the later ones of its block, of cascade and of path; [] if there are none.

    Causal attention gives every row of a block that attends in both directions, such as the tokens of an image in
    Gemma 3, the earlier ones. Attention to the later ones is causal too if the rows of a block are reversed:

        block  3 4 5 6    queries  5 4 3    keys  6 5 4    5 sees 6; 4 sees 6, 5; 3 sees 6, 5, 4

    A row has a copy in the path that brings it, whose last copies are the rows that it brings.
    """
    queries, bounds = _reversed_blocks(block_of_row)
    keys, of_q, of_k = queries + 1, plan.path_cu_seqlens_q, plan.path_cu_seqlens_k
    copies = keys + (of_k - of_q)[np.searchsorted(of_q, keys, side="right")]
    sides = [_Side(bounds, indices=each) for each in (queries, keys, copies)]
    return [(sides[0], other) for other in sides[1:]] if len(queries) else []


def _reversed_blocks(block_of_row: IntArray) -> tuple[IntArray, IntArray]:
    """Return the queries of the blocks that have two rows or more, back to back, and their bounds.

    A block is shared as a whole or not at all, so its rows are consecutive.
    """
    starts = np.flatnonzero(np.diff(block_of_row, prepend=-1))
    ends = np.append(starts[1:], len(block_of_row))
    is_block = (block_of_row[starts] >= 0) & (ends - starts > 1)
    last, lengths = (ends - 2)[is_block], (ends - starts - 1)[is_block]
    bounds = cumulative(lengths)
    queries: IntArray = (last + bounds[:-1]).repeat(lengths) - np.arange(bounds[-1])
    return queries, bounds


def _longest(bounds: IntArray) -> int:
    return int(np.diff(bounds).max(initial=0))
