"""Prompts are computed once on their unique tokens: what the cache does not hold of them, in one pass or a few."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from radixtrain.attention import continued_attention
from radixtrain.generation.cache import Match, Node, RadixCache
from radixtrain.generation.key_values import KeyValues, LayerRows
from radixtrain.hf.attention_interface import Heads
from radixtrain.hf.backbone import Parts
from radixtrain.hf.generating import GeneratingCall, device_of
from radixtrain.kernels.stored import Readers, Shared
from radixtrain.tree.arrays import IntArray, back_to_back, concatenate_ranges, lengths_of
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.movable import on_device
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.sorting import sort_sequences

MAX_ROWS = 16_384  # new rows of a pass, as long as it is more than one prompt


def prefill(parts: Parts, cache: RadixCache, prompts: Sequence[IntArray]) -> list[Node]:
    """Compute what a cache does not hold of some prompts, (n,), int64 each; returns where each ends.

    Call it inside `generating`, while no other thread uses the cache. The ends are locked, and the caller unlocks them;
    after an error nothing is locked.
    """
    ends = [cache.root] * len(prompts)

    def move(member: int, node: Node) -> None:
        cache.lock(node)
        cache.unlock(ends[member])
        ends[member] = node

    for end in ends:
        cache.lock(end)
    try:
        for members in passes_of(prompts, MAX_ROWS):
            matches = {member: cache.match_prefix(prompts[member]) for member in members}
            for member, match in matches.items():
                move(member, match.node)
            matches = {member: match for member, match in matches.items() if match.length < len(prompts[member])}
            if matches:
                added = Continuation.of([prompts[member] for member in matches], list(matches.values()))
                cache.counters.num_computed += added.plan.num_rows
                for member, rows in zip(matches, _computed(parts, added), strict=True):
                    move(member, cache.insert(prompts[member], rows.from_place))
    except BaseException:
        for end in ends:
            cache.unlock(end)
        raise
    return ends


def _computed(parts: Parts, added: Continuation) -> list[Continued]:
    """Run the model on what sequences add; returns the keys and values of each."""
    call = PromptCall(parts, added)
    call.logits(on_device(added.ids, call.depths.device), call.depths.new_zeros(1))  # of any row: none is needed
    rows = np.split(added.plan.inverse_indices, added.plan.cu_seqlens[1:-1])
    stored = [KeyValues(call.stored, each) for each in rows]
    return [Continued(each, length) for each, length in zip(stored, added.num_stored, strict=True)]


class Continued(NamedTuple):
    """Keys and values of a sequence after its first `length` tokens."""

    rows: KeyValues
    length: int

    def from_place(self, start: int) -> KeyValues:
        """Return those from a place in the sequence on."""
        return self.rows[start - self.length :]


def passes_of(
    sequences: Sequence[IntArray], max_tokens: int, more: int = 0, most: int = sys.maxsize
) -> Iterator[list[int]]:
    """Divide sequences into passes of a bounded number of unique tokens; yields their places, neighbours together.

    more: tokens that each sequence takes beside its own. most: sequences of a pass. Empty sequences are left out.
    """
    by_order = sort_sequences(*back_to_back(sequences))
    members: list[int] = []
    total = 0
    for member, length, lcp in zip(
        *(x.tolist() for x in (by_order.order, by_order.lengths, by_order.lcp)), strict=True
    ):
        if members and (len(members) == most or total + length - lcp + more > max_tokens):
            yield members
            members, total = [], 0
        total += length + more - (lcp if members else 0)
        members.append(member)
    if members:
        yield members


@dataclass(frozen=True, eq=False)
class Continuation:
    """What some sequences add to what is stored of them. Host only.

    Two of them share a row only if they continue the same node, so each token is marked with the node that its
    sequence continues.

    plan: of their ends. ids: (U,), int64. the token of each of its rows.
    nodes: that they continue, without repeats. owners: (U,), int64. which of these nodes each row continues.
    num_stored: tokens of each sequence that are stored. longest: sequence, in tokens, with these.
    """

    plan: PrefixPlan
    ids: IntArray
    nodes: Sequence[Node]
    owners: IntArray
    num_stored: Sequence[int]
    longest: int

    @classmethod
    def of(cls, sequences: Sequence[IntArray], matches: Sequence[Match]) -> Continuation:
        """Plan what sequences, (n,), int64 each, add. matches: what is stored of them."""
        nodes = list(dict.fromkeys(match.node for match in matches))
        places = {node: place for place, node in enumerate(nodes)}
        num_stored = [match.length for match in matches]
        ends = [ids[length:] for ids, length in zip(sequences, num_stored, strict=True)]
        tokens, bounds = back_to_back(ends)
        lengths = lengths_of(bounds)
        owners = np.array([places[match.node] for match in matches]).repeat(lengths)
        marked = tokens + owners * (1 + int(tokens.max()))
        positions = concatenate_ranges(np.array(num_stored), lengths)
        plan = build_prefix_plan(marked, bounds, positions)
        first = plan.gather_indices
        return cls(plan, tokens[first], nodes, owners[first], num_stored, max(map(len, sequences)))

    @cached_property
    def readers(self) -> dict[Node, IntArray]:
        """Return which rows see each stored node."""
        owners: dict[Node, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for above in node.path:
                owners.setdefault(above, []).append(place)
        return {node: np.flatnonzero(np.isin(self.owners, places)) for node, places in owners.items()}


@dataclass(eq=False)
class _StoredNode:
    """A node that rows continue. first: the place of its first token in the sequence."""

    node: Node
    first: int
    readers: Readers


class PromptCall(GeneratingCall):
    """A pass of what sequences add. stored: its keys and values, by attention call."""

    def __init__(self, parts: Parts, continuation: Continuation) -> None:
        device = device_of(parts)
        super().__init__(parts, on_device(continuation.plan.position_ids, device), continuation.longest)
        self.tree = TreeLayout.from_plan(continuation.plan).to(device, non_blocking=True)
        self.stored: list[LayerRows] = []
        self.continued = [
            _StoredNode(node, _first_place(node), Readers.of(rows, device))
            for node, rows in continuation.readers.items()
        ]

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Store the keys and values of the new rows, and attend to them and to what they continue."""
        query, key, value = heads
        number = len(self.calls)
        self.stored.append(LayerRows(key.contiguous(), value.contiguous()))
        stored = [(each, each.node.rows.of_layer(number)) for each in self.continued]
        shared = [Shared(each.readers, keys, values, each.first) for each, (keys, values) in stored]
        del scoring["both_ways"]  # only images attend so
        how = {"depths": self.depths, "window": window, **scoring}
        return continued_attention(query, key, value, self.tree, shared, **how)


def _first_place(node: Node) -> int:
    return sum(len(above.tokens) for above in node.path[:-1])
