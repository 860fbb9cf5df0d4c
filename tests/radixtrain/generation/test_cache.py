"""The radix cache: what is refused, what is said of it, and who may use it at once.

Random operations against an oracle: `tests/claims/generation/test_cache_oracle.py`.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache


def serve(cache: RadixCache, ids: list[int]) -> tuple[int, int]:
    """Tokens found and stored of one prompt."""
    node, length = cache.match_prefix(ids)
    cache.lock(node)
    cache.insert(ids, lambda start: ids[start:])
    cache.unlock(node)
    return length, len(ids) - length


def put(cache: RadixCache, *prompts: list[int]) -> RadixCache:
    for ids in prompts:
        serve(cache, ids)
    return cache


def test_str_is_the_tree() -> None:
    """Of a conversation that branches, and of long runs and locks."""
    turns, follow_ups = [101, 202, 303, 404, 505, 606, 707, 808], ([909, 110, 211, 312], [413, 514, 615, 716])
    cache = RadixCache(max_tokens=100)
    assert [serve(cache, turns), *(serve(cache, turns + each) for each in follow_ups)] == [(0, 8), (8, 4), (8, 4)]
    assert str(cache).splitlines() == [
        "RadixCache: 16 tokens (at most 100)",
        "  [101, 202, 303, 404, 505, 606, 707, 808] 8 tokens",
        "    [909, 110, 211, 312] 4 tokens",
        "    [413, 514, 615, 716] 4 tokens",
    ]
    cache = put(RadixCache(), list(range(12)), [7])
    node = cache.match_prefix(range(10)).node
    for locked in (node, node, cache.match_prefix([7]).node):
        cache.lock(locked)
    assert str(cache).splitlines() == [
        "RadixCache: 13 tokens (no limit)",
        "  [0, 1, 2, 3, 4, 5, ..., 8, 9] 10 tokens, 2 locks",
        "    [10, 11] 2 tokens",
        "  [7] 1 token, 1 lock",
    ]
    assert repr(cache) == "RadixCache(max_tokens=None, num_tokens=13, num_nodes=3)"
    assert repr(node) == "Node([0, 1, 2, 3, 4, 5, ..., 8, 9], 10 tokens, 2 locks)"


def test_another_owner_empties_the_cache() -> None:
    cache = put(RadixCache(), [1, 2, 3])
    for owner, left in (("a", 3), ("a", 3), ("b", 0)):
        cache.belong_to(owner)
        assert cache.num_tokens == left
    put(cache, [1, 2, 3])
    cache.lock(cache.match_prefix([1]).node)
    for _ in range(2):  # the old owner stays: the rows are refused again
        with pytest.raises(RuntimeError, match="in use"):
            cache.belong_to("c")


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "9", True])
def test_a_wrong_budget_is_refused(max_tokens: Any) -> None:
    with pytest.raises(UserError, match="max_tokens must be a whole number"):
        RadixCache(max_tokens)


def test_other_threads_wait_for_the_one_that_has_the_cache() -> None:
    """Each operation, while `exclusive()` is held, which the same thread may enter again."""
    cache = put(RadixCache(), [1, 2])
    node = cache.match_prefix([1, 2]).node
    cache.lock(node)
    operations = (
        lambda: cache.match_prefix([1]),
        lambda: cache.insert([7], lambda start: [7]),
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
    assert (
        cache.num_nodes == depth == len(str(cache).splitlines()) - 1 == len(cache.match_prefix([7] * depth).node.path)
    )
    assert cache.evict(depth) == depth
