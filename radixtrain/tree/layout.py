"""The prefix plan as two tensors, from which attention reads what it launches.

`host`, int64, stays on the CPU: how long each section of `rows` is, and the numbers that a launch needs. `rows`, int32,
goes to the device: bounds and indices, section after section. Both are made in the DataLoader worker, so that a batch
is moved by one copy, nothing is read back, and a compiled graph holds two tensors and no number of the tree.

T packed tokens, U unique rows, B sequences, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.tree_flex import tree_block_mask
from radixtrain.kernels.varlen_args import Ragged, added_to_scores
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.chains import Cascade, Entry, cascade
from radixtrain.tree.plan import PrefixPlan

# Most rows of a group of chains on the host, whose kernels loop: 84 segments of 64 banking77 rows, most of them a few
# tokens, would be 104 calls one by one.
GROUP = 32
OF_PLAN = ("gather_indices", "inverse_indices", "cu_seqlens", "segment_starts", "subtree_ends")
OF_PATHS = ("path_keys", "path_cu_seqlens_q", "path_cu_seqlens_k")
SECTIONS = (*OF_PLAN, *OF_PATHS, "own", "calls", "block_of_row", "block_queries")
BOUNDS = ("cu_seqlens", "own", *OF_PATHS[1:])  # sections whose longest entry is known on the host
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
        sections = dict(zip(SECTIONS, (*of_plan, np.array(calls.bounds), call_rows, *of_blocks), strict=True))
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
        return bool(self._host.calls) or self.num_rows < self.num_tokens

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
        """Return the calls of `cascade`; the first covers every row."""
        return self.pieces_on_host(GROUP) if self.device.type == "cpu" else self.packed_pieces()

    def packed_pieces(self) -> tuple[Piece, ...]:
        """Return calls for kernels that take all entries at once."""
        return self._causal_sections("own", "own"), *self._packed_calls()

    def pieces_on_host(self, most_rows: int) -> tuple[Piece, ...]:
        """Return calls for kernels that loop: groups of chains, and slices. most_rows: of a group of several chains."""
        starts, parents, ends = (x.tolist() for x in (*self.segments, self.subtree_ends))
        cut = cascade(starts, parents, ends, most_rows)
        groups = zip(pairwise(cut.bounds), cut.num_chains, strict=True)
        masks = tuple(None if number == 1 else self._mask(*rows) for rows, number in groups)
        bounds = torch.tensor(cut.bounds, dtype=torch.int32, device="cpu")
        longest = _longest(np.array(cut.bounds))
        own = self._causal(bounds, bounds, longest, longest, masks)
        return own, *(_sliced(entry) for entries in cut.calls for entry in entries)

    def _mask(self, start: int, end: int) -> Tensor:
        """Make the mask of the rows [start, end), float32: 0 if `k <= q < row_subtree_ends[k]`, else -inf."""
        rows = torch.arange(start, end, device="cpu")
        hidden = (rows[:, None] < rows) | (rows[:, None] >= self.row_subtree_ends[start:end])
        return added_to_scores(hidden)

    def _causal_sections(self, q: str, k: str) -> Piece:
        of_q, of_k = (self.section(name, torch.int32) for name in (q, k))
        longest_q, longest_k = (self._host.longest[BOUNDS.index(name)] for name in (q, k))
        return self._causal(of_q, of_k, longest_q, longest_k)

    def _causal(self, q: Tensor, k: Tensor, longest_q: int, longest_k: int, masks: Any = None) -> Piece:
        """Make a causal call on all rows. q, k: its bounds, (E+1,), int32."""
        on_host = None
        if self.device.type == "cpu":  # on a device, reading them would wait
            entries = zip(*(pairwise(x.tolist()) for x in (q, k)), strict=True)
            on_host = tuple((*queries, *keys) for queries, keys in entries)
        return Piece(slice(None), slice(None), Ragged(q, k, longest_q, longest_k, True, on_host, masks))

    def _packed_calls(self) -> Iterator[Piece]:
        """Yield the calls onto prefixes of chains as a device takes them."""
        at = 0

        def taken(number: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            at += number
            return self.section("calls", dtype)[at - number : at]

        numbers = iter(self._host.calls)
        for entries, num_q, num_k, max_q, max_k, first_q, first_k in zip(*[numbers] * WIDTH, strict=True):
            cu_q, cu_k = (taken(entries + 1, torch.int32) for _ in range(2))
            q_rows, k_rows = (
                taken(number, torch.int64) if first < 0 else slice(first, first + number)
                for number, first in ((num_q, first_q), (num_k, first_k))
            )
            yield Piece(q_rows, k_rows, Ragged(cu_q, cu_k, max_q, max_k, causal=False))

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


def _encoded_calls(cut: Cascade) -> tuple[list[int], IntArray]:
    """Return the numbers of the calls, and their bounds and indices. Rows that follow each other need no indices."""
    numbers: list[int] = []
    rows: list[IntArray] = []
    for entries in cut.calls:
        q0, q1, k0, k1 = np.array(entries).T
        firsts, indices = [], []
        for starts, lengths in ((q0, q1 - q0), (k0, k1 - k0)):
            bounds = cumulative(lengths)
            is_slice = bool((starts == starts[0] + bounds[:-1]).all())
            firsts.append(int(starts[0]) if is_slice else -1)
            indices += [] if is_slice else [concatenate_ranges(starts, lengths)]
            rows.append(bounds)
        rows += indices
        lengths_q, lengths_k = q1 - q0, k1 - k0
        numbers += [len(entries), *(int(f(x)) for f in (np.sum, np.max) for x in (lengths_q, lengths_k)), *firsts]
    return numbers, np.concatenate([*rows, np.zeros(0, dtype=np.int64)])


def _sliced(entry: Entry) -> Piece:
    q0, q1, k0, k1 = entry
    return Piece(slice(q0, q1), slice(k0, k1), Ragged.whole(q1 - q0, k1 - k0))


def _longest(bounds: np.ndarray) -> int:
    return int(np.diff(bounds).max(initial=0))
