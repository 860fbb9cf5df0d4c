"""Prefill: what the cache does not hold of the prompts is computed once for all that share it, and kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.passes import LaneRange, Pass, PromptPlan, Request
from radixtrain.hf.backbone import Parts
from radixtrain.hf.cached_pass import StoredPasses, on_stored_rows
from radixtrain.tree.arrays import IntArray

MAX_ROWS = 16_384  # new rows of a pass of prompts, as long as it is more than one prompt


@dataclass
class Counts:
    """Tokens so far. prompt: of all prompts. cached: prompt tokens found in the cache. computed: rows of prompts."""

    prompt: int = 0
    cached: int = 0
    computed: int = 0


@contextmanager
def prefill_on(
    cache: RadixCache | None, model: nn.Module, parts: Parts, kernel: str, longest: int
) -> Iterator[Prefill]:
    """Let the model compute prompts, while no other thread uses the cache or the model.

    cache: emptied if the weights have changed since its last call, and shrunk to its budget afterwards; None for one
        that is dropped afterwards.
    model: as the user gave it. parts: of it. longest: as in `check_generation`.

    Raises UserError as `on_stored_rows` does.
    """
    if cache is not None and not isinstance(cache, RadixCache):
        raise UserError(f"cache: expected a RadixCache, or None to keep nothing, got {type(cache).__name__}")
    own = RadixCache() if cache is None else cache
    with own.exclusive(), on_stored_rows(model, parts, kernel, longest):
        if cache is not None:
            cache.of_model(model)
        try:
            yield Prefill(parts, own, kernel)
        finally:
            if cache is not None:
                cache.shrink()


class Prefill:
    """Runs a model on prompts, inside `on_stored_rows`.

    parts: of the model. cache: whose store is used. kernel: of the attention.
    """

    def __init__(self, parts: Parts, cache: RadixCache, kernel: str = "auto"):
        self.cache, self.counts = cache, Counts()
        self.store = cache.store
        self.passes = StoredPasses(parts, self.store.write, kernel)

    @property
    def device(self) -> torch.device:
        """Return the device on which the model takes its tokens."""
        return self.passes.device

    def logits(self, step: Pass) -> Tensor:
        """Run a pass and return its logits, (R, V)."""
        return self.passes.logits(step.input_ids, step.position_ids, step.predictor_indices, step.layout)

    def start(
        self,
        requests: Sequence[Request],
        lanes: LaneRange,
        first_lane: int,
        longest_tail: int,
        predicting: Sequence[IntArray] | None = None,
    ) -> tuple[Tensor, IntArray]:
        """Compute these prompts: what is kept goes into the cache and is locked, the tails go to the lanes.

        requests: sorted. first_lane: of the first of them. longest_tail: as in `PromptPlan.of`.
        predicting: of each request, the places of the tokens whose logits are wanted; by default only its last one.

        Returns logits, (R, V), and the length of each tail, (B,), int64. The caller releases each request at its end.
        Raises CacheFull, and leaves no trace, if the budget is too small.
        """
        matches = [self.cache.match_prefix(_cacheable(request, at)) for request, at in _paired(requests, predicting)]
        for match in matches:
            self.cache.lock(match.node)
        try:
            plan = PromptPlan.of(requests, matches, longest_tail)
            return self._compute(plan, lanes, first_lane, predicting), plan.tails
        finally:
            for match in matches:
                self.cache.unlock(match.node)

    def _compute(
        self, plan: PromptPlan, lanes: LaneRange, first_lane: int, predicting: Sequence[IntArray] | None
    ) -> Tensor:
        slots = self.cache.reserve(len(plan.kept_rows))
        try:
            step = plan.pass_of(slots, lanes, first_lane, predicting, self.device)
            logits = self.logits(step)
        except BaseException:
            self.cache.cancel(slots)
            raise
        for place, request in enumerate(plan.requests):
            path = plan.kept_path(place, slots)
            request.hold(self.cache, self.cache.insert(request.keys[: len(path)], path))
        self.counts.prompt += sum(len(request.prompt) for request in plan.requests)
        self.counts.cached += int(plan.ends.num_stored.sum())
        self.counts.computed += plan.ends.plan.num_rows
        return logits


def number_that_fits(waiting: Iterable[Request], most: int) -> int:
    """Count the waiting requests, sorted, that are one pass: at least one, at most `most`."""
    rows, number = 0, 0
    for request in waiting:
        rows += len(request.prompt) - (request.lcp if number else 0)
        if number == most or (number and rows > MAX_ROWS):
            break
        number += 1
    return number


def _paired(
    requests: Sequence[Request], predicting: Sequence[IntArray] | None
) -> Iterable[tuple[Request, IntArray | None]]:
    places: Sequence[IntArray | None] = predicting or [None] * len(requests)
    return zip(requests, places, strict=True)


def _cacheable(request: Request, predicting: IntArray | None) -> IntArray:
    """Return the tokens that the cache may supply: those before the first one that predicts."""
    return request.keys[: -1 if predicting is None else int(predicting[0])]
