"""The radix cache: what is refused, and whose it is.

Random operations against an oracle: `tests/claims/generation/test_cache_oracle.py`.
"""

import sys
from typing import Any

import pytest

from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache


def put(cache: RadixCache, ids: list[int]) -> RadixCache:
    cache.insert(ids, lambda start: ids[start:])
    return cache


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


def test_deep_trees_need_no_recursion() -> None:
    depth = sys.getrecursionlimit() + 200
    cache = put(RadixCache(), [7] * depth)
    for length in range(depth - 1, 0, -1):
        cache.match_prefix([7] * length)
    assert depth == len([*cache.nodes]) == len(cache.match_prefix([7] * depth).node.path)
    assert cache.evict(depth) == depth
