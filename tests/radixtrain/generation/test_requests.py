"""One answer that is being generated: what it holds in the cache."""

from typing import cast

import numpy as np

from radixtrain.generation.cache import Node, RadixCache
from radixtrain.generation.requests import Request
from radixtrain.generation.sampling import TokenChooser


def request(prompt: list[int]) -> Request:
    return Request(0, np.array(prompt), 4, np.zeros(0))


def put(cache: RadixCache, ids: list[int]) -> Node:
    found = cache.match_prefix(ids)
    return cache.insert(ids, np.append(found.slots, cache.reserve(len(ids) - len(found.slots))))


class Drawing:
    """What draws for a request: its place in the result, and a place in the answer."""

    def draws(self, index: int, count: int) -> np.ndarray:
        return index + np.arange(count) / 1000


def test_each_token_has_its_own_draw() -> None:
    each, chooser = Request(5, np.array([7, 8]), 300, np.zeros(0)), cast(TokenChooser, Drawing())
    found = []
    for token in range(300):
        found.append(each.next_draw(chooser))
        each.token_ids.append(token)
    assert found == (5 + np.arange(300) / 1000).tolist()
    assert len(each.draws) < 600


def test_no_two_requests_share_a_list() -> None:
    one, other = request([7]), request([7])
    one.token_ids.append(1)
    one.logprobs.append(-1.0)
    assert other.token_ids == other.logprobs == []


def test_hold_remembers_the_path_from_the_root() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3, 4, 5])
    node = put(cache, [1, 2, 3, 8, 9])
    each = request([1, 2, 3, 8, 9, 10])
    each.hold(cache, node)
    assert each.node is node and (node.locks, cache.root.locks) == (1, 1)
    assert each.path.tolist() == cache.match_prefix([1, 2, 3, 8, 9]).slots.tolist() and len(each.path) == 5


def test_hold_takes_the_slots_that_the_tree_has() -> None:
    """Not those that were computed beside them and given back."""
    cache = RadixCache()
    put(cache, [1, 2])
    twice = cache.reserve(3)
    each = request([1, 2, 3])
    each.hold(cache, cache.insert([1, 2, 3], twice))
    assert each.path[2] == twice[2] and not set(each.path[:2].tolist()) & set(twice.tolist())


def test_hold_at_the_root_is_an_empty_path() -> None:
    cache, each = RadixCache(), request([1])
    each.hold(cache, cache.root)
    assert each.path.tolist() == [] and each.path.dtype == np.int64
    each.release(cache)
    assert cache.root.locks == 0


def test_a_held_path_outlives_splits_and_evictions() -> None:
    cache = RadixCache()
    node = put(cache, [1, 2, 3, 4])
    each = request([1, 2, 3, 4, 5])
    each.hold(cache, node)
    put(cache, [1, 2, 9])  # splits the node
    assert cache.evict(100) == 1
    assert cache.match_prefix([1, 2, 3, 4]).slots.tolist() == each.path.tolist()


def test_release_is_once() -> None:
    """An error may end a request that has ended already."""
    cache = RadixCache()
    node = put(cache, [1, 2])
    each = request([1, 2, 3])
    each.release(cache)
    each.hold(cache, node)
    each.release(cache)
    each.release(cache)
    assert each.node is None and cache.root.locks == node.locks == 0
