"""One forward pass of generation as attention sees it: new rows, and the stored rows that they attend to.

U new rows, C slots of the store of keys and values. A pass either computes what a prompt adds to the cache (`prompts`
is its tree), or one token of every active sequence (`lanes`).

A sliding window that binds cuts through shared rows: every query then gets a copy of its last slots (`windowed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.lanes import Lanes
from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Ragged
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative, lengths_of
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.shared_pieces import shared_pieces


@dataclass(frozen=True, eq=False)
class Paths:
    """The new rows as runs: consecutive rows that are the end of one sequence. Host only.

    cu_seqlens: (E+1,), int64. where each run begins.
    slots_of: run -> (n,), int64. the slots of its whole sequence, its new rows last.
    """

    cu_seqlens: np.ndarray
    slots_of: Callable[[int], np.ndarray]

    def within(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots, (J,), that the runs see through a window of that many tokens, and their bounds, (E+1,)."""
        new = lengths_of(self.cu_seqlens)
        slots = [self.slots_of(run)[-(window - 1 + int(count)) :] for run, count in enumerate(new)]
        return np.concatenate(slots), cumulative(np.array([len(each) for each in slots]))


@dataclass(eq=False)
class CachedLayout:
    """A pass on the device of its tensors.

    num_rows: U. max_seqlen: the longest sequence at the end of this pass, in tokens.
    written_rows: (W,), int64, or None for all rows in order. slots: (W,), int64. which row is stored in which slot;
        a row may be stored in several.
    shared: stored rows that several queries see whole; `k_rows` are slots.
    paths: what a layer whose window binds reads instead of `shared`, `prompts` and `lanes`.
    prompts: the tree of the new rows; None for a pass with lanes.
    lanes: of the new rows, one each; None for a pass with prompts.
    blocks: new rows that attend in both directions, if there are any.
    """

    num_rows: int
    max_seqlen: int
    written_rows: Tensor | None
    slots: Tensor
    shared: tuple[Piece, ...]
    paths: Paths
    prompts: TreeLayout | None = None
    lanes: Lanes | None = None
    blocks: BlockLayout | None = None

    _windows: dict[int, tuple[Tensor, Ragged]] = field(default_factory=dict, init=False, repr=False)

    def windowed(self, window: int) -> tuple[Tensor, Ragged]:
        """Return the slots to copy, and a causal varlen call on them, for a layer whose window binds."""
        if window not in self._windows:
            device = self.slots.device
            slots, cu_seqlens_k = self.paths.within(window)
            call = _causal_call(self.paths.cu_seqlens, cu_seqlens_k, device)
            self._windows[window] = torch.from_numpy(slots).to(device), call
        return self._windows[window]


@dataclass(frozen=True, eq=False)
class Continuations:
    """What some sequences add to the cache. Host only.

    Their ends are one prefix plan. Two of them share a row only if they continue the same cached node, so each token is
    marked with the node that its sequence continues.

    stored: of each sequence, (n,), int64, the slots of what the cache holds of it. num_stored: (B,), how many.
    plan: of their ends. ids: (U,), int64. the token of each of its rows.
    node_of: (B,). which of `nodes` each sequence continues. nodes: of the cache, without repeats.
    """

    stored: Sequence[IntArray]
    num_stored: IntArray
    plan: PrefixPlan
    ids: IntArray
    nodes: Sequence[Any]
    node_of: IntArray

    @classmethod
    def of(cls, sequences: Sequence[IntArray], matches: Sequence[Any]) -> Continuations:
        """Plan what sequences, (L,), int64 each, add to the cache. matches: of `RadixCache.match_prefix`."""
        nodes = list(dict.fromkeys(match.node for match in matches))
        places = {node: place for place, node in enumerate(nodes)}
        node_of = np.array([places[match.node] for match in matches])
        stored = [match.slots for match in matches]
        num_stored = np.array([len(slots) for slots in stored])
        lengths = np.array([len(ids) for ids in sequences]) - num_stored
        tokens = np.concatenate([ids[start:] for ids, start in zip(sequences, num_stored, strict=True)])
        marks = 1 + max(int(tokens.max()), 1)
        marked = tokens + marks * node_of.repeat(lengths)
        positions = concatenate_ranges(num_stored, lengths)
        plan = build_prefix_plan(marked, cumulative(lengths), positions)
        return cls(stored, num_stored, plan, tokens[plan.gather_indices], nodes, node_of)

    @cached_property
    def lengths(self) -> IntArray:
        """Return the tokens of each sequence, (B,), int64."""
        return self.num_stored + lengths_of(self.plan.cu_seqlens)

    def layout(self, rows: IntArray, slots: IntArray, device: torch.device) -> CachedLayout:
        """Lay out the pass that writes these rows to these slots, (W,), int64: all of them if a window may bind."""
        sequences, path = self.plan.path_sequences, self.paths(rows, slots)
        return CachedLayout(
            num_rows=self.plan.num_rows,
            max_seqlen=int(self.lengths.max()),
            written_rows=on_device(rows, device),
            slots=on_device(slots, device),
            shared=self._shared(device),
            paths=Paths(self.plan.path_cu_seqlens_q, lambda run: path(int(sequences[run]))),
            prompts=TreeLayout.from_plan(self.plan).to(device, non_blocking=True),
        )

    def paths(self, rows: IntArray, slots: IntArray) -> Callable[[int], IntArray]:
        """Return a function from the place of a sequence to the slots of all its tokens; rows not given have slot 0."""
        slot_of_row, bounds = np.zeros(self.plan.num_rows, dtype=np.int64), self.plan.cu_seqlens
        slot_of_row[rows] = slots
        slots_of_tokens = slot_of_row[self.plan.inverse_indices]
        return lambda place: np.append(self.stored[place], slots_of_tokens[bounds[place] : bounds[place + 1]])

    def _shared(self, device: torch.device) -> tuple[Piece, ...]:
        """Return the cached rows that the new rows see whole. Rows that continue one node are neighbours."""
        owner = self.node_of.repeat(lengths_of(self.plan.cu_seqlens))[self.plan.gather_indices]
        return pieces_of(self.nodes, np.searchsorted(owner, np.arange(len(self.nodes) + 1)), device)


def pieces_of(nodes: Sequence[Any], bounds: IntArray, device: torch.device) -> tuple[Piece, ...]:
    """Return what rows read from the cache: reader i has the rows [bounds[i], bounds[i + 1]) and ends at nodes[i]."""
    runs = [
        (np.concatenate([np.arange(*bounds[each : each + 2]) for each in readers]), slots)
        for readers, slots in shared_runs(nodes)
    ]
    return shared_pieces(runs, device)


def shared_runs(nodes: Sequence[Any]) -> list[tuple[list[int], IntArray]]:
    """Return what the sequences that end at these nodes read from the cache, from the root: (places of readers, slots).

    nodes: where each sequence ends. Consecutive nodes with the same readers are one run.
    """
    readers: dict[Any, list[int]] = {}
    for place, node in enumerate(nodes):
        for above in path_to_root(node):
            if above.parent is not None:  # the root has no slots
                readers.setdefault(above, []).append(place)
    runs: dict[tuple[int, ...], list[Any]] = {}
    for node, places in readers.items():
        runs.setdefault(tuple(places), []).append(node)  # a node comes before the one above it
    return [(list(places), np.concatenate([node.slots for node in run[::-1]])) for places, run in runs.items()]


def path_to_root(node: Any) -> Iterator[Any]:
    """Walk from a node of `RadixCache` to the root."""
    while node is not None:
        yield node
        node = node.parent


def on_device(values: IntArray, device: torch.device) -> Tensor:
    """Copy to a device without waiting: CUDA has copied pageable memory aside when `to` returns."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _causal_call(cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray, device: torch.device) -> Ragged:
    """Make a causal call with these bounds, (E+1,) each."""
    bounds = cu_seqlens_q, cu_seqlens_k
    q, k = (torch.from_numpy(each.astype(np.int32)).to(device) for each in bounds)
    longest_q, longest_k = (int(lengths_of(each).max(initial=0)) for each in bounds)
    entries = zip(*(pairwise(each.tolist()) for each in bounds), strict=True)
    return Ragged(q, k, longest_q, longest_k, True, tuple((*queries, *keys) for queries, keys in entries))
