"""The radix cache: what is refused, what is said of it, and who may use it at once.

Random operations against an oracle: `tests/claims/generation/test_cache_oracle.py`.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from radixtrain.errors import UserError
from radixtrain.generation.cache import CacheFull, RadixCache


def serve(cache: RadixCache, ids: list[int]) -> tuple[int, int]:
    """Tokens found and computed of one prompt, as an engine serves it."""
    node, slots = cache.match_prefix(ids)
    cache.lock(node)
    new = cache.reserve(len(ids) - len(slots))
    cache.insert(ids, np.append(slots, new))
    cache.unlock(node)
    return len(slots), len(new)


def put(cache: RadixCache, *prompts: list[int]) -> RadixCache:
    for ids in prompts:
        serve(cache, ids)
    return cache


def drawn(cache: RadixCache) -> list[str]:
    return str(cache).splitlines()[1:]


def test_str_is_the_tree() -> None:
    """Of a conversation that branches, and of long runs, locks and reserved tokens."""
    turns, follow_ups = [101, 202, 303, 404, 505, 606, 707, 808], ([909, 110, 211, 312], [413, 514, 615, 716])
    cache = RadixCache(max_tokens=100)
    assert [serve(cache, turns), *(serve(cache, turns + each) for each in follow_ups)] == [(0, 8), (8, 4), (8, 4)]
    assert str(cache).splitlines() == [
        "RadixCache: 16 tokens (at most 100), 0 of them reserved",
        "  [101, 202, 303, 404, 505, 606, 707, 808] 8 tokens",
        "    [909, 110, 211, 312] 4 tokens",
        "    [413, 514, 615, 716] 4 tokens",
    ]
    cache = put(RadixCache(), list(range(12)), [7])
    node = cache.match_prefix(range(10)).node
    for locked in (node, node, cache.match_prefix([7]).node):
        cache.lock(locked)
    cache.reserve(3)
    assert str(cache).splitlines() == [
        "RadixCache: 16 tokens (no limit), 3 of them reserved",
        "  [0, 1, 2, 3, 4, 5, ..., 8, 9] 10 tokens, 2 locks",
        "    [10, 11] 2 tokens",
        "  [7] 1 token, 1 lock",
    ]
    assert repr(cache) == "RadixCache(max_tokens=None, num_tokens=16, num_nodes=3)"
    assert repr(node) == "Node([0, 1, 2, 3, 4, 5, ..., 8, 9], 10 tokens, 2 locks)"


def test_a_full_cache_evicts_nothing() -> None:
    cache = put(RadixCache(max_tokens=6), [1, 2, 3], [4, 5])
    cache.lock(cache.match_prefix([1]).node)
    cache.reserve(1)
    message = r"max_tokens=6 has room for 4 more tokens while .* and 5 are needed"
    with pytest.raises(CacheFull, match=message) as refusal:
        cache.reserve(5)
    assert cache.counters.num_evictions == 0 and cache.num_tokens == 6
    assert isinstance(refusal.value, UserError)


def test_the_pool_takes_the_shortest_run_that_is_long_enough_and_grows_by_what_the_tree_holds() -> None:
    cache = RadixCache()
    own = cache.reserve(20)
    for start, end in ((0, 6), (8, 11), (13, 17)):
        cache.cancel(own[start:end])
    assert cache.reserve(3).tolist() == [8, 9, 10] and cache.reserve(3).tolist() == [13, 14, 15]
    assert cache.reserve(7).tolist() == [0, 1, 2, 3, 4, 5, 16] and cache.pool.capacity == 20
    cache.pool.allocate(100, contiguous=True)
    assert cache.reserve(1).tolist() == [120] and cache.pool.capacity == 120 + 1 + 20


def test_other_weights_empty_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixtrain.generation.cache.fingerprint", lambda model: model)
    cache = put(RadixCache(), [1, 2, 3])
    for model, left in (("a", 3), ("a", 3), ("b", 0)):
        cache.of_model(model)  # type: ignore[arg-type]
        assert cache.num_tokens == left
    put(cache, [1, 2, 3])
    cache.lock(cache.match_prefix([1]).node)
    for _ in range(2):  # the old fingerprint stays: rows of old weights are refused again
        with pytest.raises(RuntimeError, match="in use"):
            cache.of_model("c")  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "9", True])
def test_a_wrong_budget_is_refused(max_tokens: Any) -> None:
    with pytest.raises(UserError, match="max_tokens must be a whole number"):
        RadixCache(max_tokens)


def test_other_threads_wait_for_the_one_that_has_the_cache() -> None:
    """Each operation, while `exclusive()` is held, which the same thread may enter again."""
    cache = put(RadixCache(), [1, 2])
    node, own = cache.match_prefix([1, 2]).node, cache.reserve(2)
    cache.lock(node)
    operations = (
        lambda: cache.match_prefix([1]),
        lambda: cache.insert([7], own[:1]),
        lambda: cache.unlock(node),
        lambda: cache.evict(1),
    )
    with ThreadPoolExecutor(1) as pool:
        for operation in operations:
            with cache.exclusive(), cache.exclusive():
                waiting = pool.submit(operation)
                with pytest.raises(TimeoutError):
                    waiting.result(timeout=0.05)  # one that waits cannot finish in it
            waiting.result()


def test_deep_trees_need_no_recursion() -> None:
    depth = sys.getrecursionlimit() + 200
    cache = put(RadixCache(), [7] * depth)
    for length in range(depth - 1, 0, -1):
        cache.match_prefix([7] * length)
    assert cache.num_nodes == depth == len(drawn(cache)) == len(cache.match_prefix([7] * depth).slots)
    assert cache.evict(depth) == depth
