"""Runs as entries of a batch. How they come back from workers, pickles and movers is in test_layout.py."""

import numpy as np
import torch

from radixtrain import RadixCollator
from radixtrain.testing import FREE_FORKS
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import RunLayout, cheapest_runs

TENSORS = ("rows", "places", "parents")
FOREST = [[7, 8, 9], [7, 8, 5], [7, 8, 9, 6], [9, 1], [9, 2, 2], [9, 2, 4]]


def plan_of(sequences, **options):
    ids = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(ids, np.cumsum([0, *map(len, sequences)]), **options)


def runs_of(sequences, rates=FREE_FORKS):
    plan = plan_of(sequences)
    return RunLayout.from_segments(plan.segment_starts, plan.segment_parents, rates)


def contents(runs):
    """All fields as plain Python, to compare."""
    return runs.calls, *(getattr(runs, name).tolist() for name in TENSORS)


def test_entries_of_a_batch():
    """[0, 1) 3, then [1, 3) 7 8 -> 5 5 | 9 1."""
    batch = runs_of([[7, 8, 9, 1], [3], [7, 8, 5, 5]]).to_batch()
    assert batch.pop("radix_runs_calls") == ((1, 2, 1, ()), (1, 1, 0, ()), (2, 2, 0, ((0, 2),)))
    assert {name: value.tolist() for name, value in batch.items()} == {
        "radix_runs_rows": [1, 2, 0, 3, 4, 5, 6],
        "radix_runs_places": [2, 0, 1, 3, 4, 5, 6],
        "radix_runs_parents": [0, 0],
    }


def test_it_is_the_table_of_the_plan():
    plan = plan_of(FOREST)
    table = cheapest_runs(plan.segment_starts, plan.segment_parents, FREE_FORKS)
    for runs in (RunLayout.from_table(table), runs_of(FOREST)):
        assert contents(runs) == (table.calls, *(getattr(table, name).tolist() for name in TENSORS))
        assert {getattr(runs, name).dtype for name in TENSORS} == {torch.int64}


def test_a_tree_layout_has_them_if_asked():
    layout, without = (TreeLayout.from_plan(plan_of(FOREST), run_cost=cost) for cost in (FREE_FORKS, None))
    more = layout.to_batch().keys() - without.to_batch().keys()
    assert more == {f"radix_runs_{name}" for name in ("calls", *TENSORS)}
    assert contents(layout.runs) == contents(runs_of(FOREST))
    assert without.runs is None and TreeLayout.from_batch(without.to_batch()).runs is None


def test_the_collator_makes_them_of_its_rows():
    """Padding rows and a branch that it does not share included."""
    features = [{"input_ids": ids, "labels": ids} for ids in FOREST]
    batch = RadixCollator(run_cost=FREE_FORKS, min_shared_tokens=3, pad_to_multiple_of=8)(features)
    plan = plan_of(FOREST, min_shared_tokens=3, pad_to_multiple_of=8)
    runs = RunLayout.from_segments(plan.segment_starts, plan.segment_parents, FREE_FORKS)
    assert contents(RunLayout.from_batch(batch)) == contents(runs)
    assert len(runs.places) == batch["input_ids"].shape[1]
