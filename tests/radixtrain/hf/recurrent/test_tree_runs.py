"""The runs of a batch, as a prepared model finds or makes them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TRIES

from radixtrain.hf.recurrent.tree_runs import TreeRuns, parents_of
from radixtrain.testing import FREE_FORKS, ragged_batches
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import RunCost, RunLayout, cheapest_runs, runs_of_segments

PROMPT = [*range(300)]
LONG = [[*PROMPT, 1], [*PROMPT, 2, 2], [*PROMPT, 3]]  # by default it pays to fork


def plan_of(sequences, **options):
    ids = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(ids, np.cumsum([0, *map(len, sequences)]), **options)


def contents(runs):
    return runs.calls, runs.rows.tolist(), runs.places.tolist(), runs.parents.tolist()


@settings(max_examples=4 * TRIES, deadline=None)
@given(
    ragged_batches(min_length=0, min_sequences=0, max_length=14),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 8]),
)
def test_parents_from_the_ends_of_subtrees(sequences, min_shared_tokens, pad_to_multiple_of):
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    found = parents_of(plan.segment_starts, plan.subtree_ends)
    assert found.dtype == np.int64
    assert found.tolist() == plan.segment_parents.tolist()


def test_parents_literally():
    """A -> B -> C | D, A -> E, and F by itself."""
    starts, ends = np.array([0, 3, 5, 7, 10, 12, 13]), np.array([12, 10, 7, 10, 12, 13])
    assert parents_of(starts, ends).tolist() == [-1, 0, 1, 1, 0, -1]


def test_those_of_the_batch_if_it_brings_some():
    layout = TreeLayout.from_plan(plan_of([[1, 1, 1, 2], [1, 1, 1, 3]]), run_cost=FREE_FORKS)
    assert TreeRuns(layout).forked is layout.runs
    assert layout.runs.num_forks == 1


def test_otherwise_the_cheapest_by_default():
    plan = plan_of(LONG)
    runs = TreeRuns(TreeLayout.from_plan(plan))
    expected = cheapest_runs(plan.segment_starts, plan.segment_parents)
    assert expected.num_forks == 1
    assert contents(runs.forked) == contents(RunLayout.from_table(expected))
    assert runs.forked is runs.forked, "made once"


@pytest.mark.parametrize("run_cost", [None, RunCost()], ids=["made here", "of the batch"])
def test_whole_sequences(run_cost):
    plan = plan_of(LONG)
    runs = TreeRuns(TreeLayout.from_plan(plan, run_cost=run_cost))
    expected = runs_of_segments(plan.segment_starts, plan.segment_parents, None)
    assert contents(runs.whole) == contents(RunLayout.from_table(expected))
    assert runs.whole is runs.whole and runs.whole is not runs.forked
    assert not any(call.keeps or call.sources for call in runs.whole.calls)


def test_runs_of_the_batch_are_not_read_back():
    """On meta tensors, as on a device under capture, reading a value raises."""
    layout = TreeLayout.from_plan(plan_of([[1, 2, 3], [4, 5]]), run_cost=RunCost()).to("meta")
    runs = TreeRuns(layout)
    assert runs.forked is runs.whole is layout.runs
    assert runs.forked.rows.device == torch.device("meta")
