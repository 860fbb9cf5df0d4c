"""Orders in which sequences of a prompt meet: permutations, the r they reach, and how much they mix.

Means over the batches of an epoch may be off by five of their standard errors; the seeds are fixed.
"""

from collections import Counter
from functools import partial
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.prefix_sampler import ENOUGH, GroupedOrder, batches_of, ratio_of_batches
from radixtrain.tree.groups import PrefixGroups, find_prefix_groups

PROMPT, OWN, BATCH = 280, 30, 32  # a batch of one prompt has r = 32 * 310 / (280 + 32 * 30) = 8.0


def rng(seed=0):
    return np.random.default_rng(seed)


def chats(prompts, per_prompt, seed=0):
    """Sequences of equally frequent prompts, shuffled, and the prompt of each. Nothing else is shared."""
    generator = rng(seed)
    starts = generator.integers(0, 30_000, (prompts, PROMPT))
    which = generator.permutation(np.repeat(np.arange(prompts), per_prompt))
    own = generator.integers(0, 30_000, (len(which), OWN))
    own[:, 0] = 30_000 + np.arange(len(which))
    return [np.concatenate([starts[prompt], tail]) for prompt, tail in zip(which, own, strict=True)], which


def ratio(sequences, order, batch_size=BATCH, max_tokens=None):
    return ratio_of_batches(lambda index: [sequences[index]], batches_of(order, batch_size, 10_000), max_tokens)


def drawn(sequences, together, batch_size=BATCH, seed=1):
    groups = find_prefix_groups(sequences)
    return GroupedOrder(groups, batch_size, together).draw(np.arange(len(sequences)), rng(seed))


def in_batches(order, batch_size=BATCH):
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def assert_mean(found, expected):
    error = np.std(found, ddof=1) / len(found) ** 0.5
    assert abs(np.mean(found) - expected) <= 5 * error + 1e-12, f"{np.mean(found)} +- {error}, expected {expected}"


@pytest.fixture(scope="module")
def twenty():
    return chats(20, 160)


@pytest.mark.parametrize("together", [1, 2, 4, 8, 16, 32])
def test_r_of_20_prompts(twenty, together):
    """1.8 for a plain shuffle, 8.0 for whole batches of a prompt; 6.5 for two halves."""
    sequences, which = twenty
    order = drawn(sequences, together)
    num_prompts = [len(set(which[batch])) for batch in in_batches(order)]
    runs, of_a_batch = 3200 // together, BATCH // together
    assert_mean(num_prompts, 20 * (1 - comb(runs - runs // 20, of_a_batch) / comb(runs, of_a_batch)))
    r = BATCH * (PROMPT + OWN) / (np.mean(num_prompts) * PROMPT + BATCH * OWN)
    assert ratio(sequences, order) == pytest.approx(r, rel=1e-12)
    assert round(r, 1) == {1: 1.8, 32: 8.0}.get(together, round(r, 1))


def test_the_choice_mixes_prompts_and_reaches_most(twenty):
    sequences, which = twenty
    order = GroupedOrder.choose(find_prefix_groups(sequences), BATCH, 0)
    assert order.together == 16
    drawn_order = order.draw(np.arange(len(sequences)), rng())
    prompts = [Counter(which[batch].tolist()) for batch in in_batches(drawn_order)]
    assert all(max(batch.values()) in (16, 32) for batch in prompts)
    assert_mean([len(batch) == 1 for batch in prompts], 9 / 199)  # the second of 200 runs is one of 9
    assert ratio(sequences, drawn_order) > ENOUGH * 8.0


@pytest.mark.parametrize("batch_size", [5, 8, 30, 31, 32, 100])
def test_a_batch_has_no_more_prompts_than_it_must(batch_size):
    """As many runs as it has places for, and the parts of at most two in the places between."""
    for together in (each for each in (2, 3, 7, 16, 31, 32) if each <= batch_size):
        sequences, which = chats(4, 7 * together, seed=together)
        order = drawn(sequences, together, batch_size)
        counts = [len(set(which[batch].tolist())) for batch in in_batches(order, batch_size)]
        assert max(counts) <= batch_size // together + min(2, batch_size % together)


def test_micro_batches_share_only_inside(twenty):
    order = drawn(twenty[0], 16)
    assert ratio(twenty[0], order, max_tokens=700) < 0.8 * ratio(twenty[0], order)


def test_nested_prompts():
    """20 prompts, 50 contexts in each, 3 questions about each: those of a context meet, beside others of its prompt."""
    generator = rng()
    parts = partial(generator.integers, 0, 9999)
    sequences, labels = [], []
    for number in range(20):
        prompt = parts(300)
        for context in range(50):
            start = np.concatenate([prompt, parts(100)])
            sequences += [np.concatenate([start, parts(50)]) for _ in range(3)]
            labels += [(number, context)] * 3
    shuffle = generator.permutation(len(sequences))
    sequences, labels = [sequences[index] for index in shuffle], [labels[index] for index in shuffle]
    order = drawn(sequences, 8)
    for batch in in_batches(order)[:-1]:
        found = Counter(labels[index] for index in batch)
        assert sum(count < 3 for count in found.values()) <= 2, "the first and the last one"
        assert len({prompt for prompt, _ in found}) <= 8
    assert ratio(sequences, order) > 2 * ratio(sequences, np.arange(len(sequences)))


@pytest.mark.parametrize(("prompts", "per_prompt"), [(100, 1), (1, 100)])
def test_distinct_prompts_and_a_single_one_are_a_plain_shuffle(prompts, per_prompt):
    sequences, _ = chats(prompts, per_prompt)
    assert drawn(sequences, 8).tolist() == rng(1).permutation(100).tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 33])
def test_tiny_data_and_batches_larger_than_it(count):
    sequences = chats(2, 20)[0][:count]
    for batch_size in (1, 2, 32):
        choice = GroupedOrder.choose(find_prefix_groups(sequences), batch_size, 0)
        for order in (choice, GroupedOrder(choice.groups, batch_size, batch_size)):
            assert sorted(order.draw(np.arange(count), rng()).tolist()) == list(range(count))


def test_every_row_is_as_likely_in_every_batch():
    """Rows of a large group, of a small one, and of none; chi-square with 14 degrees of freedom: 1 in 10,000 is 42."""
    group_of = np.array([1] * 40 + [2] * 5 + [0] * 15)
    order = GroupedOrder(PrefixGroups(group_of, np.array([0, 0, 0]), np.array([0, 99, 99]), np.full(60, 120)), 4, 2)
    places = np.stack([np.argsort(order.draw(np.arange(60), rng(seed))) // 4 for seed in range(3000)])
    for row in (0, 39, 40, 44, 45, 59):
        counts = np.bincount(places[:, row], minlength=15)
        assert ((counts - 200) ** 2 / 200).sum() < 42


def test_partners_change_with_the_epoch(twenty):
    """Two rows of a prompt of 160 are in one run of 16 with a probability of 15 / 159, and in one batch of two runs
    with one of 9 / 199 for the other rows.
    """
    sequences, which = twenty
    first, second = (drawn(sequences, 16, seed=seed) for seed in (1, 2))
    batch_of = np.argsort(second) // BATCH
    again = [
        np.mean(batch_of[batch[which[batch] == which[batch[0]]][1:]] == batch_of[batch[0]])
        for batch in in_batches(first)
    ]
    assert_mean(again, 15 / 159 + (1 - 15 / 159) / 199)


@st.composite
def group_trees(draw):
    parent = [0]
    for number in range(1, draw(st.integers(1, 8))):
        parent.append(draw(st.integers(0, number - 1)))
    group_of = draw(st.lists(st.integers(0, len(parent) - 1), max_size=40))
    depth, lengths = np.arange(len(parent)), np.full(len(group_of), 20)
    return PrefixGroups(np.array(group_of, dtype=np.int64), np.array(parent, dtype=np.int64), depth, lengths)


@settings(max_examples=100, deadline=None)
@given(group_trees(), st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_index_comes_as_often_as_it_was_given(groups, batch_size, together, data):
    count = len(groups.group_of)
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=60)) if count else []
    order = GroupedOrder(groups, batch_size, min(together, batch_size))
    found = order.draw(np.array(indices, dtype=np.int64), rng())
    assert sorted(found.tolist()) == sorted(indices)


def test_r_of_nothing_and_of_empty_sequences():
    assert ratio_of_batches(lambda index: [], [], None) == 1.0
    assert ratio_of_batches(lambda index: [np.zeros(0, dtype=np.int64)], [[0]], None) == 1.0
    assert batches_of(np.zeros(0, dtype=np.int64), 4) == []


def test_some_batches_of_an_epoch():
    order = np.arange(1000)
    assert batches_of(order, 10, 3) == [list(range(10)), list(range(500, 510)), list(range(990, 1000))]
    assert len(batches_of(order, 10)) == 100 and len(batches_of(np.arange(9000), 512)) == 16
