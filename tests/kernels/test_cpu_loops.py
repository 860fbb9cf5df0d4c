"""Rectangles of queries and keys: views, masks, and that they meet every pair once."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.kernels.cpu_loops import LONG, STRIP, Rectangles, schedule_of
from radixtrain.kernels.varlen_args import Ragged


def cut(lengths, causal=True, window=None, masks=None):
    """lengths: (queries, keys) of each entry."""
    sides = zip(*lengths, strict=True) if lengths else ((), ())
    cu_seqlens = (torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in sides)
    return schedule_of(Ragged(*cu_seqlens, 0, 0, causal, masks=masks), window)


def pairs(whole):
    """Counts every (query, key) pair that is computed and not hidden, by the views that the kernels take."""
    found = Counter()
    rows = torch.arange(10_000)
    for part in whole.parts:
        for n, (queries, keys) in enumerate(zip(part.queries(rows), part.keys(rows), strict=True)):
            mask = part.mask if part.mask is None or part.mask.ndim == 2 else part.mask[n, 0]
            for i, query in enumerate(queries.tolist()):
                seen = keys if mask is None else keys[mask[i] == 0]
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


def shapes(found):
    return [(b.number, b.num_queries, b.num_keys, b.first_query, b.first_key) for b in found.parts]


def test_long_causal_entries_are_strips_and_very_long_ones_are_left_to_the_kernel():
    """Strips see what is before them and are about equally high: one query more than one holds is two halves."""
    found = cut([(2 * STRIP, 2 * STRIP)])
    assert shapes(found) == [(1, STRIP, STRIP, 0, 0), (1, STRIP, 2 * STRIP, STRIP, 0)]
    assert (found.parts[1].mask == 0).int().sum(1).tolist() == list(range(STRIP + 1, 2 * STRIP + 1))
    assert [b.num_queries for b in cut([(STRIP + 1, STRIP + 1)]).parts] == [STRIP // 2, STRIP // 2 + 1]
    (part,) = cut([(LONG, LONG)]).parts
    assert (part.num_queries, part.causal, part.mask) == (LONG, True, None)
    assert [each.number for each in cut([(LONG, LONG)] * 2).parts] == [1, 1]
    assert not any(part.causal for part in cut([(LONG, LONG + 1)]).parts), "is_causal counts from the top left"
    assert not any(part.causal for part in cut([(LONG, LONG)], window=9).parts)


def test_masks_of_equal_entries_are_stacked():
    masks = [torch.tensor([[0.0, float("-inf")], [n, 0.0]]) for n in (0.0, float("-inf"))]
    (part,) = cut([(2, 2), (2, 2)], masks=masks).parts
    assert part.mask.shape == (2, 1, 2, 2)
    assert torch.equal(part.mask[:, 0], torch.stack(masks))


@pytest.mark.parametrize("number", [1, 3])
def test_views_are_no_copies(number):
    x = torch.arange(24.0).view(12, 2)[:, 1:]
    part = Rectangles(1, 2, 0, 1, number=number, query_step=4, key_step=4)
    view = part.queries(x)
    assert view.tolist() == [[[x[1 + 4 * n].item()], [x[2 + 4 * n].item()]] for n in range(number)]
    view.fill_(-1)
    assert int((x == -1).sum()) == 2 * number


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([(0, 0), (1, 1), (3, 3), (2, 5), (70, 70), (70, 90), (140, 140)]), max_size=5),
    st.booleans(),
    st.sampled_from([None, 1, 2, 80]),
)
def test_every_pair_is_in_one_rectangle(lengths, causal, window):
    window = window if causal else None
    found = cut(lengths, causal, window)
    assert pairs(found) == expected_pairs(lengths, causal, window)
    assert found.num_queries == sum(queries for queries, keys in lengths if keys)


def test_a_call_is_cut_once_for_each_window():
    """Every layer asks for the same. A changed copy is cut anew."""
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    ragged = Ragged(bounds, bounds, 3, 3, causal=True)
    whole = schedule_of(ragged)
    assert schedule_of(ragged) is whole and whole.parts[0].mask is not None
    assert schedule_of(ragged, window=2) is not whole
    assert schedule_of(ragged, window=2) is schedule_of(ragged, window=2)
    assert schedule_of(replace(ragged, causal=False)).parts[0].mask is None
