"""Runs in a batch: they come back the same from workers, pinned memory and the movers of trainers."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader

from radixtrain import RadixCollator
from radixtrain.testing import FREE_FORKS, ragged_batches
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.run_choice import cheapest_runs
from radixtrain.tree.run_layout import RunLayout
from radixtrain.tree.runs import RunCall, RunCost

TENSORS = ("rows", "places", "parents")
FOREST = [[7, 8, 9], [7, 8, 5], [7, 8, 9, 6], [9, 1], [9, 2, 2], [9, 2, 4]]
NO_FORK = [[1, 2, 3], [4, 5]]


def plan_of(sequences, **options):
    ids = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(ids, np.cumsum([0, *map(len, sequences)]), **options)


def runs_of(sequences, rates=FREE_FORKS):
    plan = plan_of(sequences)
    return RunLayout.from_segments(plan.segment_starts, plan.segment_parents, rates)


def contents(runs):
    """All fields as plain Python, to compare."""
    values = {field.name: getattr(runs, field.name) for field in fields(runs)}
    return {name: (v.dtype, v.tolist()) if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def kinds(runs):
    """The types that a mixer relies on."""
    assert {type(call) for call in runs.calls} == {RunCall}
    assert {type(value) for call in runs.calls for value in call} == {int, tuple}
    assert {type(value) for call in runs.calls for pair in call.sources for value in pair} <= {int}
    return {getattr(runs, name).dtype for name in TENSORS}


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
        assert runs.calls == table.calls
        assert [getattr(runs, name).tolist() for name in TENSORS] == [getattr(table, name).tolist() for name in TENSORS]
        assert kinds(runs) == {torch.int64}


@settings(max_examples=40, deadline=None)
@given(ragged_batches(min_length=0, min_sequences=0), st.sampled_from([FREE_FORKS, RunCost()]))
def test_round_trip_through_a_batch_and_a_pickle(sequences, rates):
    runs = runs_of(sequences, rates)
    batch = {"input_ids": None, **runs.to_batch()}
    for again in (batch, pickle.loads(pickle.dumps(batch))):
        assert contents(RunLayout.from_batch(again)) == contents(runs)
    assert contents(pickle.loads(pickle.dumps(runs))) == contents(runs)


def as_lists(value):
    """What pinned memory or a mover may make of nested tuples."""
    return [as_lists(each) for each in value] if isinstance(value, tuple) else value


MOVERS = {
    "as they are": lambda batch: batch,
    "lists": lambda batch: {name: as_lists(value) for name, value in batch.items()},
    "a worker's queue": lambda batch: pickle.loads(pickle.dumps(batch)),
    "DataLoader": lambda batch: next(iter(DataLoader([batch], batch_size=None))),
    "lightning": lambda batch: move_data_to_device(batch, torch.device("cpu")),
    "accelerate": lambda batch: send_to_device(batch, torch.device("cpu")),
}


@pytest.mark.parametrize("sequences", [FOREST, NO_FORK, [[3]]], ids=["forks", "no fork", "one token"])
@pytest.mark.parametrize("move", MOVERS.values(), ids=MOVERS)
def test_a_batch_survives(move, sequences):
    runs = runs_of(sequences)
    again = RunLayout.from_batch(move(runs.to_batch()))
    assert contents(again) == contents(runs)
    assert kinds(again) == {torch.int64}


@pytest.mark.parametrize("move", [move_data_to_device, send_to_device], ids=["lightning", "accelerate"])
def test_moved_to_a_device(move):
    runs = runs_of(FOREST)
    meta = torch.device("meta")
    for moved in (RunLayout.from_batch(move(runs.to_batch(), meta)), runs.to(meta), runs.to("meta", non_blocking=True)):
        assert {getattr(moved, name).device.type for name in TENSORS} == {"meta"}
        assert moved.calls == runs.calls
    assert {getattr(runs, name).device.type for name in TENSORS} == {"cpu"}


@pytest.mark.parametrize("name", ["calls", *TENSORS])
def test_a_lost_entry_is_named(name):
    batch = runs_of(FOREST).to_batch()
    del batch["radix_runs_" + name]
    with pytest.raises(KeyError) as error:
        RunLayout.from_batch(batch)
    assert error.value.args == ("radix_runs_" + name,)


class TestInATreeLayout:
    def test_only_if_they_were_asked_for(self):
        layout, without = (TreeLayout.from_plan(plan_of(FOREST), run_cost=cost) for cost in (FREE_FORKS, None))
        more = layout.to_batch().keys() - without.to_batch().keys()
        assert more == {f"radix_runs_{name}" for name in ("calls", *TENSORS)}
        assert contents(layout.runs) == contents(runs_of(FOREST))
        assert without.runs is None
        assert TreeLayout.from_batch(without.to_batch()).runs is None

    @pytest.mark.parametrize("tiles", [None, (16, 16)], ids=["without tiles", "with tiles"])
    def test_round_trip(self, tiles):
        layout = TreeLayout.from_plan(plan_of(FOREST), tiles=tiles, run_cost=FREE_FORKS)
        again = TreeLayout.from_batch(layout.to_batch())
        assert contents(again.runs) == contents(layout.runs)
        assert (again.tiles is None) == (tiles is None)
        assert again.levels == layout.levels

    def test_to(self):
        layout = TreeLayout.from_plan(plan_of(FOREST), run_cost=FREE_FORKS)
        moved = layout.to("meta")
        assert {getattr(moved.runs, name).device.type for name in TENSORS} == {"meta"}
        assert moved.runs.calls == layout.runs.calls
        assert layout.runs.rows.device.type == "cpu"

    def test_a_lost_entry_is_named(self):
        batch = TreeLayout.from_plan(plan_of(FOREST), run_cost=FREE_FORKS).to_batch()
        del batch["radix_runs_rows"]
        with pytest.raises(KeyError, match="radix_runs_rows"):
            TreeLayout.from_batch(batch)


def test_the_collator_makes_them_of_its_rows():
    """Padding rows and a branch that it does not share included."""
    features = [{"input_ids": ids, "labels": ids} for ids in FOREST]
    batch = RadixCollator(run_cost=FREE_FORKS, min_shared_tokens=3, pad_to_multiple_of=8)(features)
    plan = plan_of(FOREST, min_shared_tokens=3, pad_to_multiple_of=8)
    runs = RunLayout.from_segments(plan.segment_starts, plan.segment_parents, FREE_FORKS)
    assert contents(RunLayout.from_batch(batch)) == contents(runs)
    assert len(runs.places) == batch["input_ids"].shape[1]
