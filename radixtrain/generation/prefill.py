"""Prompts come in: what the cache does not hold of them is computed, once for all that share it, and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixtrain.generation.cache import RadixCache
from radixtrain.generation.passes import LaneBlock, Pass, PromptPlan
from radixtrain.generation.requests import Request
from radixtrain.generation.store import KeyValueStore
from radixtrain.hf.backbone import Parts
from radixtrain.hf.cached_pass import StoredPasses
from radixtrain.tree.arrays import IntArray

__all__ = ["Counts", "Prefill", "number_that_fits"]

MAX_ROWS = 16_384  # new rows of a pass of prompts, as long as it is more than one prompt


@dataclass
class Counts:
    """Tokens so far. prompt: of all prompts. cached: of those, found in the cache. computed: rows of prompts."""

    prompt: int = 0
    cached: int = 0
    computed: int = 0


class Prefill:
    """Runs a model on prompts, inside `on_stored_rows`.

    parts: of the model. cache: whose store is used, and made at its first use. kernel: of the attention.
    """

    def __init__(self, parts: Parts, cache: RadixCache, kernel: str = "auto"):
        if cache.store is None:
            cache.store = KeyValueStore(cache.pool)
        self.cache, self.counts = cache, Counts()
        self.store: KeyValueStore = cache.store
        self.passes = StoredPasses(parts, self.store, kernel)

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return self.passes.device

    def logits(self, each: Pass) -> Tensor:
        """(R, V). Run a pass."""
        return self.passes.logits(each.input_ids, each.position_ids, each.rows, each.layout)

    def start(
        self,
        requests: Sequence[Request],
        lanes: LaneBlock,
        first_lane: int,
        longest_tail: int,
        predicting: Sequence[IntArray] | None = None,
    ) -> tuple[Tensor, IntArray]:
        """Compute these prompts: what is kept goes into the cache and is locked, the tails go to the lanes.

        requests: sorted. first_lane: of the first of them. longest_tail: as in `PromptPlan.of`.
        predicting: of each request, the places of the tokens whose logits are wanted; by default only its last one.

        Returns logits, (R, V), and the length of each tail. Raises CacheFull, and leaves no trace, if the budget is too
        small; whoever ends a request unlocks its node.
        """
        matches = [self.cache.match_prefix(_cachable(request, at)) for request, at in _with(requests, predicting)]
        for match in matches:
            self.cache.lock(match.node)
        try:
            plan = PromptPlan.of(requests, matches, longest_tail)
            return self._compute(plan, lanes, first_lane, predicting), plan.tails
        finally:
            for match in matches:
                self.cache.unlock(match.node)

    def _compute(
        self, plan: PromptPlan, lanes: LaneBlock, first_lane: int, predicting: Sequence[IntArray] | None
    ) -> Tensor:
        slots = self.cache.reserve(len(plan.kept_rows))
        try:
            logits = self.logits(plan.pass_of(slots, lanes, first_lane, predicting, self.device))
        except BaseException:
            self.cache.cancel(slots)
            raise
        for place, request in enumerate(plan.requests):
            path = plan.kept_path(place, slots)
            request.hold(self.cache, self.cache.insert(request.prompt[: len(path)], path))
        self.counts.prompt += sum(len(request.prompt) for request in plan.requests)
        self.counts.cached += int(plan.cached.sum())
        self.counts.computed += plan.plan.num_rows
        return logits


def number_that_fits(waiting: Iterable[Request], most: int) -> int:
    """How many of the requests that wait, sorted, are one pass: at least one, at most `most`."""
    rows, number = 0, 0
    for request in waiting:
        rows += len(request.prompt) - (request.lcp if number else 0)
        if number == most or (number and rows > MAX_ROWS):
            break
        number += 1
    return number


def _with(
    requests: Sequence[Request], predicting: Sequence[IntArray] | None
) -> Iterable[tuple[Request, IntArray | None]]:
    places: Sequence[IntArray | None] = predicting or [None] * len(requests)
    return zip(requests, places, strict=True)


def _cachable(request: Request, predicting: IntArray | None) -> IntArray:
    """The tokens that need not be computed if the cache has them: those before the first one that predicts."""
    return request.prompt[: -1 if predicting is None else int(predicting[0])]
