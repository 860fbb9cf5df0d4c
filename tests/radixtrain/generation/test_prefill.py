"""Prompts come in: what is computed, kept and locked, and what is left if that fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.generation import passes, prefill
from radixtrain.generation.cache import CacheFull, RadixCache
from radixtrain.generation.passes import LaneRange, worth_keeping
from radixtrain.generation.prefill import Counts, Prefill, number_that_fits
from radixtrain.generation.requests import Request
from radixtrain.generation.store import KeyValueStore
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.cached_pass import on_stored_rows
from radixtrain.testing import relative_error

PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [9, 9]]
Ids = list[int]


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3().double().eval()


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three (query, key) pairs are worth a product, so that short beginnings are kept."""
    monkeypatch.setattr(passes, "PIECE_CELLS", 3)


def lcp_of(prompts: Sequence[Ids]) -> np.ndarray:
    """Tokens that each of the sorted prompts shares with the one before it."""
    pairs = zip([[], *prompts], prompts, strict=False)
    return np.array(
        [
            next((n for n, ab in enumerate(zip(*pair, strict=False)) if ab[0] != ab[1]), min(map(len, pair)))
            for pair in pairs
        ]
    )


def requests(*prompts: Ids) -> list[Request]:
    lcp = lcp_of(prompts)
    kept = worth_keeping(lcp).tolist()
    return [Request(n, np.array(ids), 4, np.zeros(0), n, int(lcp[n]), kept[n]) for n, ids in enumerate(prompts)]


@contextmanager
def entered(model: Any, cache: RadixCache) -> Iterator[tuple[Prefill, LaneRange]]:
    """Eight lanes of 10."""
    slots = cache.pool.allocate(80, contiguous=True)
    with on_stored_rows(model, parts_of(model), "auto", 16):
        try:
            yield Prefill(parts_of(model), cache), LaneRange(int(slots[0]), 10, 8)
        finally:
            cache.pool.release(slots)


def start(model: Any, cache: RadixCache, *prompts: Ids, longest_tail: int = 10, **options: Any) -> Any:
    """The prefill, the requests, the logits and the tails."""
    with entered(model, cache) as (each, lanes):
        active = requests(*prompts)
        return (each, active, *each.start(active, lanes, 0, longest_tail, **options))


def truth(model: Any, ids: Ids, *at: int) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, list(at or [-1])]


def is_free(cache: RadixCache) -> bool:
    """Nothing is locked or reserved, and every slot is free or in the tree."""
    in_tree = cache.num_tokens
    return (cache.root.locks, cache.num_reserved) == (0, 0) and cache.pool.num_free == cache.pool.capacity - in_tree


class TestStart:
    def test_logits_of_the_last_tokens(self, model: Any) -> None:
        _, _, logits, tails = start(model, RadixCache(), *PROMPTS)
        assert relative_error(logits, torch.cat([truth(model, ids) for ids in PROMPTS])) <= 1e-12
        assert tails.tolist() == [2, 1, 2]

    def test_logits_that_are_asked_for(self, model: Any) -> None:
        cache = RadixCache()
        for _ in range(2):  # the second time from the cache, but for what predicts
            predicting = [np.array([2, 3]), np.array([0, 3]), np.array([1])]
            each, active, logits, _ = start(model, cache, *PROMPTS, predicting=predicting, longest_tail=1)
            expected = [truth(model, ids, *at.tolist()) for ids, at in zip(PROMPTS, predicting, strict=True)]
            assert relative_error(logits, torch.cat(expected)) <= 1e-12
            for request in active:
                request.release(cache)
        assert each.counts == Counts(prompt=11, cached=2 + 0 + 1, computed=3 + 4 + 1)

    def test_what_is_kept_is_cached_and_locked_by_each(self, model: Any) -> None:
        cache = RadixCache()
        each, active, _, _ = start(model, cache, *PROMPTS)
        assert [len(request.path) for request in active] == [3, 3, 0]
        assert active[0].node is active[1].node and active[2].node is cache.root
        assert active[0].node is not None and active[0].node.own_locks == 2
        assert cache.num_tokens == 3 and cache.num_reserved == 0
        assert each.counts == Counts(prompt=11, cached=0, computed=3 + 2 + 1 + 2)
        for request in active:
            request.release(cache)
        assert is_free(cache)

    def test_the_second_time(self, model: Any) -> None:
        cache = RadixCache()
        for _ in range(2):
            each, active, logits, _ = start(model, cache, *PROMPTS, [1, 2, 3])
            assert relative_error(logits, torch.cat([truth(model, ids) for ids in [*PROMPTS, [1, 2, 3]]])) <= 1e-12
            for request in active:
                request.release(cache)
        assert each.counts == Counts(prompt=14, cached=3 + 3 + 0 + 2, computed=2 + 1 + 2 + 1)
        assert cache.num_tokens == 3, "what was computed twice is not kept twice"
        assert (cache.counters.num_lookups, cache.counters.num_hits) == (8, 8)
        assert is_free(cache)

    def test_one_store_for_every_call(self, model: Any) -> None:
        cache = RadixCache()
        assert start(model, cache, PROMPTS[2])[0].store is cache.store is start(model, cache, PROMPTS[2])[0].store
        assert isinstance(cache.store, KeyValueStore) and cache.store.pool is cache.pool


class TestFailures:
    def test_a_budget_that_is_too_small(self, model: Any) -> None:
        """[1 2 3] is kept, and two tokens fit."""
        cache = RadixCache(max_tokens=2)
        with entered(model, cache) as (each, lanes), pytest.raises(CacheFull) as raised:
            active = requests(*PROMPTS)
            each.start(active, lanes, 0, 10)
        assert (raised.value.needed, raised.value.available) == (3, 2)
        assert is_free(cache) and cache.num_tokens == 0 and each.counts == Counts()
        assert all(request.node is None for request in active)

    def test_a_model_that_fails(self, model: Any) -> None:
        cache = RadixCache()
        for request in start(model, cache, *PROMPTS)[1]:
            request.release(cache)

        def interrupt(*arguments: Any) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        try:
            with entered(model, cache) as (each, lanes), pytest.raises(KeyboardInterrupt):
                each.start(requests([1, 2, 3, 7, 7, 7], [1, 2, 3, 7, 7, 8]), lanes, 0, 1)
        finally:
            handle.remove()
        assert is_free(cache) and cache.num_tokens == 3
        assert each.counts == Counts()


class TestNumberThatFits:
    def waiting(self, *lengths_and_lcps: tuple[int, int]) -> list[Request]:
        return [Request(0, np.zeros(length, dtype=int), 1, np.zeros(0), lcp=lcp) for length, lcp in lengths_and_lcps]

    @pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 2), (3, 3), (9, 3)])
    def test_at_most(self, most: int, expected: int) -> None:
        assert number_that_fits(self.waiting((5, 0), (5, 0), (5, 0)), most) == expected

    def test_rows_of_a_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """New rows count, so that many prompts with one beginning are one pass."""
        monkeypatch.setattr(prefill, "MAX_ROWS", 10)
        assert number_that_fits(self.waiting((5, 0), (5, 0), (1, 0)), 9) == 2
        assert number_that_fits(self.waiting((6, 0), (5, 0)), 9) == 1
        assert number_that_fits(self.waiting((6, 4), (8, 6), (8, 6), (7, 7)), 9) == 4

    def test_one_at_least(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first of a pass shares with none that is computed here, and a prompt cannot be cut."""
        monkeypatch.setattr(prefill, "MAX_ROWS", 10)
        assert number_that_fits(self.waiting((50, 45), (50, 50)), 9) == 1
