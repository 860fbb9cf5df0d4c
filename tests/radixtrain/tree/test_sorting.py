"""The sorted order and its LCP array against Python's own sort, and which branch points are too small to keep."""

from itertools import pairwise

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixtrain.testing import ragged_batches
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.sorting import heaviest_first, sort_sequences, without_small_branches


def pack(sequences):
    """Packed ids and cu_seqlens of a list of lists."""
    ids = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    return ids, np.cumsum([0, *map(len, sequences)])


def num_unique_by_the_rule(sequences, min_shared_tokens):
    """U by the rule for small branches, written as a recursion over groups of sequences from the root downwards."""

    def rows(group, above):
        if len(group) == 1:
            return len(group[0]) - above
        depth = min(map(len, group))
        while len({sequence[:depth] for sequence in group}) > 1:
            depth -= 1
        branches = {}
        for place, sequence in enumerate(group):  # a sequence that ends here is a branch of its own
            key = sequence[depth] if len(sequence) > depth else ("ends", place)
            branches.setdefault(key, []).append(sequence)
        kept = depth if (depth - above) * (len(branches) - 1) >= min_shared_tokens else above
        return kept - above + sum(rows(branch, kept) for branch in branches.values())

    group = [tuple(sequence) for sequence in sequences if sequence]
    return rows(group, 0) if group else 0


# Each LCP is guessed from the one before it: right, too deep, too shallow, and beyond the end of a sequence.
PARTING = [
    *([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 1], [1, 1, 1, 1, 3, 3], [1, 1, 2], [1, 1, 3, 1, 1, 1], [1, 1, 3, 1, 1, 2]),
    *([1, 1, 3, 1, 1, 2], [1, 2], [1, 2, 2, 2, 2, 2, 2], [1, 2, 3], [2, 2, 3], [2, 2, 4]),
]


@settings(max_examples=100, deadline=None)
@given(ragged_batches(min_length=0, min_sequences=0), st.sampled_from([0, 2**32]), st.sampled_from([None, 0, 3, 2**32]))
@example(PARTING, 0, None)
@example(PARTING, 0, 3)
@example(PARTING, 2**32, None)
@example(PARTING, 2**32, 2**32)
def test_sort_sequences_sorts_as_python_does(sequences, offset, place):
    """In four bytes and in eight. With the heaviest branch first, the LCP of neighbours is still what they share."""
    ids, cu_seqlens = pack([[token + offset for token in sequence] for sequence in sequences])
    by_order = sort_sequences(ids, cu_seqlens, None if place is None else np.full(len(ids), place))
    expected = sorted((index for index, ids in enumerate(sequences) if ids), key=lambda index: sequences[index])
    assert by_order.order.tolist() == expected
    moved = heaviest_first(by_order)
    assert sorted(moved.order.tolist()) == sorted(expected)
    for each in (by_order, moved):
        assert each.lengths.tolist() == [len(sequences[index]) for index in each.order]
        shared = [0]
        for one, other in pairwise(each.order.tolist()):
            pairs = list(zip(sequences[one], sequences[other], strict=False))
            shared.append(next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs)))
        assert each.lcp.tolist() == shared[: len(expected)]


def test_heaviest_first_literally():
    """By the rows of a branch, not by its sequences or its longest; of equal ones the first. Roots stay in order."""
    sequences = [[1, 2], [2, 1], [2, 2, 1], [2, 2, 2], [2, 3, 3, 3], [2, 4, 1, 1], [2, 4, 2, 2], [2, 5, 5, 5], [3] * 9]
    found = heaviest_first(sort_sequences(*pack(sequences)))
    assert found.order.tolist() == [0, 5, 6, 1, 2, 3, 4, 7, 8]
    assert found.lcp.tolist() == [0, 0, 2, 1, 1, 2, 1, 1, 0]


def test_small_branches_literally():
    """[7 8 9], [7 8 9 6] and [7 8 5] share two tokens, a branch point that saves 2; the first two one more."""
    lcp = np.array([0, 2, 3], dtype=np.int64)
    assert without_small_branches(lcp, 1).tolist() == [0, 2, 3]
    assert without_small_branches(lcp, 2).tolist() == [0, 2, 2]
    assert without_small_branches(lcp, 3).tolist() == [0, 0, 3], "from the root downwards: the run below is longer now"
    assert without_small_branches(lcp, 4).tolist() == [0, 0, 0]
    assert lcp.tolist() == [0, 2, 3], "what came is not changed"


@settings(max_examples=100, deadline=None)
@given(ragged_batches(min_length=0), st.integers(1, 12))
def test_small_branches_go_by_the_rule_and_no_other(sequences, min_shared_tokens):
    by_order = sort_sequences(*pack(sequences))
    num_unique = (by_order.lengths - without_small_branches(by_order.lcp, min_shared_tokens)).sum()
    plan = build_prefix_plan(*pack(sequences), min_shared_tokens=min_shared_tokens)
    assert plan.num_unique_tokens == num_unique == num_unique_by_the_rule(sequences, min_shared_tokens)
