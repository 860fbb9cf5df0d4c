"""Rectangles of queries and keys: masks, and that they meet every pair once."""

from collections import Counter
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.kernels.cpu_loops import BUNDLE, LONG, STRIP, rectangles_of
from tests.kernels.ragged_calls import ragged


def cut(lengths, causal=True, window=None):
    """lengths: (queries, keys) of each entry."""
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    return rectangles_of(ragged(queries, keys, causal), window)


def pairs(parts):
    """Counts every (query, key) pair that is computed and not hidden."""
    found = Counter()
    rows = torch.arange(10_000)
    for part in parts:
        keys = rows[part.keys]
        for i, query in enumerate(rows[part.queries].tolist()):
            seen = keys if part.mask is None else keys[part.mask[i] == 0]
            found.update((query, key) for key in seen.tolist())
    return found


def expected_pairs(lengths, causal, window):
    found, q0, k0 = Counter(), 0, 0
    for num_queries, num_keys in lengths:
        for i in range(num_queries):
            last = num_keys - num_queries + i if causal else num_keys - 1
            first = 0 if window is None else max(0, last - window + 1)
            found.update((q0 + i, k0 + j) for j in range(first, last + 1))
        q0, k0 = q0 + num_queries, k0 + num_keys
    return found


def shapes(parts):
    return [(part.queries.stop - part.queries.start, part.keys.stop - part.keys.start) for part in parts]


def test_long_causal_entries_are_strips_and_very_long_ones_are_left_to_the_kernel():
    """Strips see what is before them and are about equally high: one query more than one holds is two halves."""
    first, second = cut([(2 * STRIP, 2 * STRIP)])
    assert (first.queries, first.keys) == (slice(0, STRIP), slice(0, STRIP))
    assert (second.queries, second.keys) == (slice(STRIP, 2 * STRIP), slice(0, 2 * STRIP))
    assert (second.mask == 0).int().sum(1).tolist() == list(range(STRIP + 1, 2 * STRIP + 1))
    assert {queries for queries, _ in shapes(cut([(STRIP + 1, STRIP + 1)]))} == {STRIP // 2, STRIP // 2 + 1}
    (part,) = cut([(LONG, LONG)])
    assert (part.queries, part.causal, part.mask) == (slice(0, LONG), True, None)
    assert not any(part.causal for part in cut([(LONG, LONG + 1)])), "is_causal counts from the top left"
    assert not any(part.causal for part in cut([(LONG, LONG)], window=9))


def test_short_entries_that_follow_each_other_are_put_together():
    """Up to `BUNDLE` queries and keys. A causal one with more keys than queries is a strip."""
    assert shapes(cut([(3, 3), (2, 2), (BUNDLE - 5, BUNDLE - 5), (1, 1)])) == [(BUNDLE, BUNDLE), (1, 1)]
    assert shapes(cut([(3, 3), (2, 4), (1, 1)])) == [(3, 3), (2, 4), (1, 1)]
    assert shapes(cut([(3, 3), (2, 4), (1, BUNDLE)], causal=False)) == [(5, 7), (1, BUNDLE)]
    (part,) = cut([(2, 2), (1, 1)])
    assert (part.mask == 0).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    (part,) = cut([(2, 1), (1, 2)], causal=False)
    assert (part.mask == 0).int().tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([(0, 0), (1, 1), (3, 3), (2, 5), (12, 12), (70, 70), (70, 90), (140, 140)]), max_size=7),
    st.booleans(),
    st.sampled_from([None, 1, 2, 80]),
)
def test_every_pair_is_in_one_rectangle(lengths, causal, window):
    window = window if causal else None
    assert pairs(cut(lengths, causal, window)) == expected_pairs(lengths, causal, window)


def test_a_call_is_cut_once_for_each_window():
    """Every layer asks for the same. A changed copy is cut anew."""
    call = ragged([3, 2], [3, 2], causal=True)
    whole = rectangles_of(call)
    assert rectangles_of(call) is whole and whole[0].mask is not None
    assert rectangles_of(call, window=2) is not whole
    assert rectangles_of(call, window=2) is rectangles_of(call, window=2)
    assert (rectangles_of(replace(call, causal=False))[0].mask == 0).sum() == 3 * 3 + 2 * 2


def test_pairs_grow_with_the_length_alone():
    """Within a window of 64, twice the tokens are twice the pairs, not four times."""
    once, twice = (sum(queries * keys for queries, keys in shapes(cut([(n, n)], window=64))) for n in (1024, 2048))
    assert twice < 2.1 * once
