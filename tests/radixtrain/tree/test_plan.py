"""The plan against a dictionary of histories: a row for every history of (token, position)."""

import dataclasses
import pickle
import sys
import tracemalloc
from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.testing import ragged_batches
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from tests.support import batches as support

DERIVED = ["path_cu_seqlens_k", "path_keys", "segment_starts", "segment_parents", "subtree_ends"]
ARRAYS = [*(field.name for field in dataclasses.fields(PrefixPlan) if field.name != "num_padding"), *DERIVED]
NO_PARENT = -1


def plan_of(sequences, positions=None, **options):
    return support.plan_of(sequences, position_ids=None if positions is None else [*chain(*positions)], **options)


def default_positions(sequences):
    return [list(range(len(sequence))) for sequence in sequences]


def histories(sequences, positions):
    """The trie as a dict: history of (token, position) -> the packed tokens that have it, in order."""
    nodes, packed = {}, 0
    for tokens, places in zip(sequences, positions, strict=True):
        history = ()
        for pair in zip(tokens, places, strict=True):
            history = (*history, pair)
            nodes.setdefault(history, []).append(packed)
            packed += 1
    return nodes


def row_paths(plan):
    """The unique rows of every sequence, in the order of the batch."""
    return [plan.inverse_indices[start:end].tolist() for start, end in pairwise(plan.cu_seqlens.tolist())]


def row_parents(plan):
    """The row before each row; a contradiction between two sequences fails. Padding rows follow each other."""
    parents = {}
    for path in row_paths(plan):
        for parent, row in pairwise([NO_PARENT, *path]):
            assert parents.setdefault(row, parent) == parent
    for row in range(plan.num_unique_tokens, plan.num_rows):
        parents[row] = row - 1 if row > plan.num_unique_tokens else NO_PARENT
    return parents


@st.composite
def batches_with_positions(draw):
    """A ragged batch with empty sequences, and positions: default, shifted a sequence, or anything."""
    sequences = draw(ragged_batches(min_length=0, min_sequences=0))
    kind = draw(st.sampled_from(["default", "shifted", "anything"]))
    if kind == "default":
        return sequences, default_positions(sequences)
    if kind == "shifted":
        starts = [draw(st.sampled_from([0, 0, 3])) for _ in sequences]
        return sequences, [list(range(n, n + len(sequence))) for n, sequence in zip(starts, sequences, strict=True)]
    return sequences, [[draw(st.integers(0, 1)) for _ in sequence] for sequence in sequences]


options = st.fixed_dictionaries(
    {
        "min_shared_tokens": st.sampled_from([1, 1, 2, 3, 5, 8, 1000]),
        "pad_to_multiple_of": st.sampled_from([None, 1, 4, 16]),
    }
)


def test_every_array_of_the_module_docstring_example():
    plan = plan_of([[7, 8, 9], [7, 8, 5], [7, 8, 9, 6], [9]])
    assert {name: getattr(plan, name).tolist() for name in ARRAYS} == {
        "gather_indices": [6, 7, 8, 9, 5, 10],
        "inverse_indices": [0, 1, 2, 0, 1, 4, 0, 1, 2, 3, 5],
        "position_ids": [0, 1, 2, 3, 2, 0],
        "cu_seqlens": [0, 3, 6, 10, 11],
        "path_sequences": [2, 1, 3],
        "segment_starts": [0, 2, 4, 5, 6],
        "segment_parents": [-1, 0, 0, -1],
        "subtree_ends": [5, 4, 5, 6],
        "path_keys": [0, 1, 2, 3, 0, 1, 4, 5],
        "path_cu_seqlens_q": [0, 4, 5, 6],
        "path_cu_seqlens_k": [0, 4, 7, 8],
    }
    assert (plan.num_sequences, plan.num_tokens, plan.num_rows, plan.num_unique_tokens) == (4, 11, 6, 6)
    assert (plan.num_segments, plan.depth, plan.compression_ratio) == (4, 2, 11 / 6)
    assert repr(plan) == "PrefixPlan(B=4, T=11, U=6, r=1.83, depth=2, segments=4)"
    padded = plan_of([[1, 2, 3], [1, 2, 4]], pad_to_multiple_of=3)
    assert repr(padded) == "PrefixPlan(B=2, T=6, U=4 + 2 padding, r=1.50, depth=2, segments=4)"


def test_empty_batch():
    plan = build_prefix_plan([], [0], pad_to_multiple_of=8)
    assert (plan.num_sequences, plan.num_rows, plan.num_segments, plan.depth) == (0, 0, 0, 0)
    assert repr(plan) == "PrefixPlan(B=0, T=0, U=0, r=1.00, depth=0, segments=0)"


@pytest.mark.parametrize("largest", [2**32 - 1, 2**32, 2**32 + 1, 2**62], ids=str)
def test_large_ids_and_positions(largest):
    low = largest % 2**32
    plan = plan_of([[1, largest, 3], [1, largest, 4], [1, low, 5]])
    assert plan.num_unique_tokens == (5 if low == largest else 6), "the low 32 bits are not the id"
    assert plan_of([[1, 2], [1, 2]], [[0, largest], [0, low]]).num_unique_tokens == (2 if low == largest else 3)


@pytest.mark.parametrize("pad_to_multiple_of", [None, 16])
def test_plan_is_immutable_and_pickles(pad_to_multiple_of):
    plan = plan_of([[1, 2, 3], [1, 2, 4]], pad_to_multiple_of=pad_to_multiple_of)
    unread = pickle.dumps(plan)
    assert plan.depth == 2
    assert pickle.dumps(plan) == unread, "what is derived is left out"
    again = pickle.loads(unread)
    assert again.num_padding == plan.num_padding
    for name in ARRAYS:
        assert getattr(plan, name).dtype == np.int64
        assert getattr(again, name).tolist() == getattr(plan, name).tolist()
        for each in (plan, again):
            with pytest.raises(ValueError, match="read-only"):
                getattr(each, name)[0] = 9
            assert getattr(each, name) is getattr(each, name), "computed once"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_padding = 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, ">i4"])
def test_any_integer_dtype_gives_the_same_plan(dtype):
    ids, cu_seqlens = np.array([7, 8, 9, 7, 8, 5]), np.array([0, 3, 6])
    wide = np.zeros(2 * len(ids), dtype=dtype)
    wide[::2] = ids
    plan = build_prefix_plan(wide[::2], cu_seqlens.astype(dtype), np.array([0, 1, 2, 0, 1, 2], dtype=dtype))
    assert plan.gather_indices.tolist() == [3, 4, 5, 2]
    assert {getattr(plan, name).dtype for name in ARRAYS} == {np.dtype(np.int64)}


@settings(max_examples=100, deadline=None)
@given(batches_with_positions(), options)
def test_rows_are_the_distinct_histories(batch, options):
    """And each is gathered from a token that it stands for."""
    sequences, positions = batch
    plan, nodes = plan_of(sequences, positions, **options), histories(sequences, positions)
    ids, places = np.array([*chain(*sequences)], dtype=np.int64), [*chain(*positions)]
    inverse, unique = plan.inverse_indices.tolist(), plan.num_unique_tokens
    assert unique == len(nodes) or (unique > len(nodes) and options["min_shared_tokens"] > 1)
    assert ids[plan.gather_indices][plan.inverse_indices].tolist() == ids.tolist()
    assert plan.position_ids[plan.inverse_indices].tolist() == places
    assert plan.inverse_indices[plan.gather_indices[:unique]].tolist() == [*range(unique)]
    history_of_row = {}
    for history, packed in nodes.items():
        for token in packed:
            assert history_of_row.setdefault(inverse[token], history) == history, "one row stands for two histories"


@settings(max_examples=100, deadline=None)
@given(batches_with_positions(), options)
def test_segments_are_the_longest_runs_without_a_branch(batch, options):
    plan = plan_of(*batch, **options)
    parents = row_parents(plan)
    assert sorted(parents) == list(range(plan.num_rows))
    num_children = Counter(parents.values())
    heads = [row for row in range(plan.num_rows) if parents[row] == NO_PARENT or num_children[parents[row]] > 1]
    assert plan.segment_starts.tolist() == [*heads, plan.num_rows] if heads else [0]
    segment_of_row = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_starts))
    assert plan.segment_parents.tolist() == [
        -1 if parents[row] == NO_PARENT else segment_of_row[parents[row]] for row in heads
    ]
    levels = []
    for parent in plan.segment_parents.tolist():
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    sizes, children = (plan.subtree_ends - plan.segment_starts[:-1]).tolist(), {}
    for segment, parent in enumerate(plan.segment_parents.tolist()):
        children.setdefault(parent, []).append(sizes[segment])
    assert all(of[0] == max(of) for parent, of in children.items() if parent >= 0), "the heaviest child comes first"
    assert plan.depth == max(levels, default=0)


@settings(max_examples=50, deadline=None)
@given(batches_with_positions(), st.sampled_from([1, 3]), st.sampled_from([2, 5, 16]))
def test_padding_changes_nothing_before_it(batch, min_shared_tokens, multiple):
    plain = plan_of(*batch, min_shared_tokens=min_shared_tokens)
    padded = plan_of(*batch, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=multiple)
    assert padded.num_rows % multiple == 0
    assert 0 <= padded.num_padding < multiple
    assert padded.num_unique_tokens == plain.num_rows
    assert padded.compression_ratio == plain.compression_ratio
    for name in ARRAYS:
        before = getattr(plain, name)
        assert getattr(padded, name)[: len(before)].tolist() == before.tolist()


@settings(max_examples=50, deadline=None)
@given(batches_with_positions(), st.sampled_from([2**8 - 2, 2**16 - 2, 2**32 - 2, 2**32]), st.booleans())
def test_plan_depends_only_on_the_order_of_the_ids(batch, offset, shift_positions):
    sequences, positions = batch
    here = plan_of(sequences, positions)
    moved = [[token + offset for token in sequence] for sequence in sequences]
    if shift_positions:
        positions = [[place + offset for place in places] for places in positions]
    there = plan_of(moved, positions)
    for name in set(ARRAYS) - {"position_ids"}:
        assert getattr(here, name).tolist() == getattr(there, name).tolist()


def tokens_of(*shape):
    return np.random.default_rng(0).integers(0, 50_000, shape)


def shared_prompt(num_tokens):
    prompt, tails = tokens_of(250), tokens_of(num_tokens // 500, 250)
    return [np.concatenate([prompt, tail]) for tail in tails]


def one_long_sequence(num_tokens):
    return [tokens_of(num_tokens)] * 2


def single_tokens(num_tokens):
    """One of them twice: nothing else is shared, whatever the size."""
    return [[0], *np.random.default_rng(0).permutation(num_tokens - 1)[:, None]]


def nested(num_tokens):
    """Every sequence leaves one trunk further down than the one before it: n (n + 1) / 2 tokens in n levels."""
    depth = int((2 * num_tokens) ** 0.5)
    trunk = tokens_of(depth)
    return [np.append(trunk[:place], 50_000 + place) for place in range(depth)]


@pytest.mark.parametrize(
    ("batch", "num_tokens"),
    [(shared_prompt, 200_000), (one_long_sequence, 100_000), (nested, 200_000), (single_tokens, 16_384)],
)
def test_work_grows_with_the_tokens(batch, num_tokens):
    """64 times the tokens are at most 64 times the calls and 100 times the memory; a quadratic step takes 4096 times.

    NumPy's time is in its calls, each of which is at most as long as its arrays, so no clock is needed.
    """
    small, large = (calls_and_memory(batch(size)) for size in (num_tokens // 64, num_tokens))
    assert large[0] <= 64 * small[0]
    assert large[1] <= 100 * small[1]


def calls_and_memory(sequences):
    """What a plan takes: calls of functions of C, and bytes at its peak."""
    ids, cu_seqlens, calls = np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]), Counter()
    sys.setprofile(lambda frame, event, given: calls.update([event]))
    try:
        build_prefix_plan(ids, cu_seqlens)
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        build_prefix_plan(ids, cu_seqlens)
        return calls["c_call"], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
