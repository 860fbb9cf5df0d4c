"""What a forward pass of generation computes, and where it stores it. The last lines of functions use the device.

A pass of prompts computes what the cache does not hold (`Continuations`). One of a token per sequence needs no plan.

Rows that several sequences will read at every step are *kept*: their slots belong to the cache, and they are attended
to in one product. What is too short for a product of its own is computed once too, and copied to the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from radixtrain.generation.cache import Match, Node, RadixCache
from radixtrain.generation.sampling import TokenChooser
from radixtrain.kernels.lanes import Lanes
from radixtrain.kernels.merge_attention import Piece
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative, lengths_of
from radixtrain.tree.cached_layout import CachedLayout, Continuations, Paths, on_device, path_to_root, pieces_of
from radixtrain.tree.sorting import sort_sequences, without_small_branches

# (query, key) pairs that a product of its own has to save at every step to be worth its calls. On one CPU thread, with
# 2 layers of 128 and of 512, both ways were equally fast somewhere between 200 and 1,800 pairs.
PIECE_CELLS = 512
FIRST_DRAWS = 64  # numbers for the sampling of an answer; more are drawn when they are needed


@dataclass(eq=False)
class Request:
    """An answer that is requested.

    index: its place in the result. rank: its place in sorted order.
    prompt: (n,), int64.
    keys: (n,), int64. what tokens are compared by: the ids.
    max_new: most tokens of the answer.
    lcp: tokens that the prompt shares with the request before it, in sorted order.
    kept: leading tokens of the prompt that the cache should hold, because other requests read them too.
    shift: offset of the answer's positions from its places; (A,) on several axes.
    draws: (n,), float64 in [0, 1). random numbers for its first tokens; more are drawn when they are needed.

    While it runs:

    node: where its kept tokens end in the cache, locked.
    path: (m,), int64. slots of the kept tokens, the first of the sequence. The others are in its lane.
    token_ids, logprobs: of the generated tokens.
    finish_reason: as in `Generated`; empty until it is finished.
    """

    index: int
    rank: int
    prompt: IntArray
    keys: IntArray
    max_new: int
    lcp: int = 0
    kept: int = 0
    shift: IntArray = field(default_factory=lambda: np.zeros((), dtype=np.int64))
    draws: np.ndarray = field(default_factory=lambda: np.zeros(0))
    node: Node | None = None
    path: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def next_draw(self, chooser: TokenChooser) -> float:
        """Return the random number for the next token."""
        place = len(self.token_ids)
        if place >= len(self.draws):
            self.draws = chooser.draws(self.index, max(FIRST_DRAWS, 2 * place))  # begins with those before
        return float(self.draws[place])

    def hold(self, cache: RadixCache, node: Node) -> None:
        """Lock the node where the kept tokens end, and remember their slots as the cache has them."""
        cache.lock(node)
        self.node = node
        self.path = np.concatenate([above.slots for above in path_to_root(node)][::-1])

    def release(self, cache: RadixCache) -> None:
        """Unlock the node, if one is held."""
        if self.node is not None:
            cache.unlock(self.node)
            self.node = None


def sorted_requests(prompts: Sequence[IntArray], max_new: IntArray, num_samples: int = 1) -> list[Request]:
    """Make a request for each answer, sorted by prompt. max_new: per prompt. num_samples: answers per prompt."""
    by_order = sort_sequences(np.concatenate(prompts), cumulative(np.array([len(prompt) for prompt in prompts])))
    lengths = by_order.lengths.repeat(num_samples)
    is_first = np.arange(len(lengths)) % num_samples == 0
    lcp = np.where(is_first, by_order.lcp.repeat(num_samples), lengths)  # samples of a prompt share it all
    columns = zip(by_order.order.repeat(num_samples).tolist(), lcp.tolist(), worth_keeping(lcp).tolist(), strict=True)
    return [
        Request(
            place * num_samples + rank % num_samples,
            rank,
            prompts[place],
            prompts[place],
            int(max_new[place]),
            shared,
            kept,
        )
        for rank, (place, shared, kept) in enumerate(columns)
    ]


@dataclass(frozen=True)
class LaneRange:
    """The lanes of a generation, in one run of slots. first: its first slot. step: slots per lane. number: of lanes."""

    first: int
    step: int
    number: int

    def slots(self, lane: int, length: int) -> IntArray:
        """Return the first slots of a lane."""
        start = self.first + lane * self.step
        return np.arange(start, start + length)

    def slots_of(self, lanes: IntArray, lengths: IntArray) -> IntArray:
        """Return the first slots of several lanes, lane by lane. lengths: how many of each; may be 0."""
        filled = lengths > 0
        return concatenate_ranges(self.first + lanes[filled] * self.step, lengths[filled])


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass on a device.

    input_ids: (U,), int64. position_ids: (U,), or (A, U) on several axes, int64.
    predictor_indices: (R,), int64. the rows whose logits are wanted. None: all of them, in order.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictor_indices: Tensor | None
    layout: CachedLayout


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """What some prompts add to the cache. Host only.

    requests: sorted, so that prompts that share a beginning are neighbours.
    ends: of the prompts, which the cache does not hold.
    kept: (B,), int64. leading tokens of each prompt whose rows belong to the cache.
    """

    requests: Sequence[Request]
    ends: Continuations
    kept: IntArray

    @classmethod
    def of(cls, requests: Sequence[Request], matches: Sequence[Match], longest_tail: int) -> PromptPlan:
        """Plan the prompts. longest_tail: tokens of a prompt that its lane takes at most."""
        ends = Continuations.of([request.keys for request in requests], matches)
        kept = np.maximum(np.array([request.kept for request in requests]), ends.num_stored)
        return cls(requests, ends, np.maximum(kept, ends.lengths - longest_tail))

    @property
    def tails(self) -> IntArray:
        """Return the tokens of each prompt that go to its lane, (B,), int64."""
        return self.ends.lengths - self.kept

    @cached_property
    def kept_rows(self) -> IntArray:
        """Return the rows whose slots belong to the cache, ascending."""
        is_kept = np.zeros(self.ends.plan.num_rows, dtype=bool)
        is_kept[self.ends.plan.inverse_indices[self._places_in_lanes < 0]] = True
        return is_kept.nonzero()[0]

    def pass_of(
        self,
        kept_slots: IntArray,
        lanes: LaneRange,
        first_lane: int,
        predicting: Sequence[IntArray] | None,
        device: torch.device,
    ) -> Pass:
        """Make the forward pass with these slots for kept rows, and lanes from `first_lane` on for the requests.

        predicting: of each request, the places of the tokens whose logits are wanted; None for its last one.
        """
        plan, places = self.ends.plan, self._places_in_lanes
        lane_of = (first_lane + np.arange(len(self.requests))).repeat(lengths_of(plan.cu_seqlens))
        in_lane = places >= 0
        lane_slots = lanes.first + lane_of[in_lane] * lanes.step + places[in_lane]
        rows = np.concatenate([self.kept_rows, plan.inverse_indices[in_lane]])
        slots = np.concatenate([kept_slots, lane_slots])
        layout = self.ends.layout(rows, slots, device)
        wanted = plan.inverse_indices[self._tokens_at(predicting)]
        ids, positions = on_device(self.ends.ids, device), on_device(plan.position_ids, device)
        return Pass(ids, positions, on_device(wanted, device), layout)

    def kept_path(self, place: int, kept_slots: IntArray) -> IntArray:
        """Return the slots of the kept tokens of one request, if the kept rows have these slots."""
        return self.ends.paths(self.kept_rows, kept_slots)(place)[: self.kept[place]]

    @cached_property
    def _places_in_lanes(self) -> IntArray:
        """Return where each token of the plan is in the lane of its request; negative for a kept token."""
        plan = self.ends.plan
        return plan.position_ids[plan.inverse_indices] - self.kept.repeat(lengths_of(plan.cu_seqlens))

    def _tokens_at(self, predicting: Sequence[IntArray] | None) -> IntArray:
        """Return the tokens of the plan at places in the prompts; the last one of each if no places are given."""
        if predicting is None:
            return self.ends.plan.cu_seqlens[1:] - 1
        starts = self.ends.plan.cu_seqlens[:-1] - self.ends.num_stored
        return np.concatenate([start + places for start, places in zip(starts, predicting, strict=True)])


@dataclass(frozen=True, eq=False)
class SharedRows:
    """What active sequences read from the cache.

    order, inverse: (n,), int64. the sequences in the sorted order of `pieces`, and back; None if they are sorted.
    """

    pieces: tuple[Piece, ...]
    order: Tensor | None
    inverse: Tensor | None

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> SharedRows:
        """Sort the requests, so that those that read the same rows are neighbours, whatever lanes they are in."""
        order = np.argsort([request.rank for request in requests], kind="stable")
        pieces = pieces_of([requests[place].node for place in order.tolist()], np.arange(len(order) + 1), device)
        if not pieces or (np.diff(order) == 1).all():
            return cls(pieces, None, None)
        return cls(pieces, on_device(order, device), on_device(np.argsort(order), device))


def decoding_pass(
    requests: Sequence[Request],
    tokens: Tensor,
    lengths: IntArray,
    used: IntArray,
    lanes: LaneRange,
    mask: Tensor,
    shared: SharedRows,
) -> Pass:
    """Make the pass that computes the last token of each request, which is in the lane of its place.

    tokens: (n,), int64, on the device. lengths: (n,), int64. of the sequences, in tokens.
    used: (n,), int64. slots of each lane that are filled, the new token's included.
    mask: (n, longest), as in `Lanes`. shared: the kept rows that the requests read.
    """
    places, device = np.arange(len(requests)), tokens.device

    def path(run: int) -> IntArray:
        return np.concatenate([requests[run].path, lanes.slots(run, int(used[run]))])

    layout = CachedLayout(
        num_rows=len(requests),
        max_seqlen=int(lengths.max()),
        written_rows=None,
        slots=on_device(lanes.first + places * lanes.step + used - 1, device),
        shared=shared.pieces,
        paths=Paths(np.arange(len(requests) + 1), path),
        lanes=Lanes(lanes.first, lanes.step, mask, shared.order, shared.inverse),
    )
    positions = lengths - 1 + np.array([request.shift for request in requests]).T
    return Pass(tokens, on_device(positions, device), None, layout)


def worth_keeping(lcp: IntArray) -> IntArray:
    """Count the leading tokens of each sequence, (n,), int64, that deserve their own product for all that read them.

    lcp: (n,), int64. tokens that each of the sorted sequences shares with the one before it.
    """
    depths = without_small_branches(lcp, PIECE_CELLS)
    return np.maximum(depths, np.append(depths[1:], 0))
