"""Runs against the root paths of the segments: whatever is forked, each row follows exactly the rows above it."""

from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixtrain.testing import FREE_FORKS, ragged_batches
from radixtrain.tree.runs import (
    MIN_SAVED,
    RunCall,
    RunCost,
    cheapest_runs,
    runs_of_segments,
)
from tests.support.batches import DEEP, plan_of

CALLS_ONLY = RunCost(call=1.0, row=0.0, state=0.0)
# The drawing of the module: A = [0, 3), B = [3, 5), C = [5, 7), D = [7, 10), E = [10, 12).
DRAWN = np.array([0, 3, 5, 7, 10, 12]), np.array([-1, 0, 1, 1, 0])
COMB = [[*[1] * teeth, 2] for teeth in range(12)]


class Run(NamedTuple):
    """A run of a table: its rows without padding, those of all runs above it before them, and its call."""

    rows: list[int]
    path: list[int]
    call: int


def segments_of(sequences, **options):
    plan = plan_of(sequences, **options)
    return plan.segment_starts, plan.segment_parents


def runs_in(table):
    """The runs of a table, call by call, walked as a layer walks them; contradictions fail."""
    rows, parents, runs = iter(table.rows.tolist()), iter(table.parents.tolist()), []
    for call in table.calls:
        above = [runs[source][next(parents)].path for source, number in call.sources for _ in range(number)]
        given_rows = [[next(rows) for _ in range(call.length)] for _ in range(call.num_runs)]
        assert len(above) in (0, call.num_runs), "a call starts from states, or from nothing"
        unpadded = [list(dict.fromkeys(run)) for run in given_rows]
        assert [run + run[-1:] * (call.length - len(run)) for run in unpadded] == given_rows, "padding is the last row"
        assert all(len(run) == call.length for run in unpadded) or not call.keeps, "a final state after padding"
        number = len(runs)
        paths = above or [[]] * call.num_runs
        runs.append([Run(run, [*path, *run], number) for path, run in zip(paths, unpadded, strict=True)])
    assert not list(rows) and not list(parents)
    return runs


def root_paths(starts, parents):
    """The rows that every row comes after, root first, and itself."""
    paths, by_segment = [], {-1: []}
    for segment, (parent, (start, end)) in enumerate(zip(parents.tolist(), pairwise(starts.tolist()), strict=True)):
        paths += [[*by_segment[parent], *range(start, row + 1)] for row in range(start, end)]
        by_segment[segment] = [*by_segment[parent], *range(start, end)]
    return paths


def leaf_paths(starts, parents):
    paths = root_paths(starts, parents)
    return [paths[end - 1] for segment, end in enumerate(starts[1:].tolist()) if segment not in parents]


def cost_of(table, rates):
    states = table.num_forks + len(table.parents)
    return sum(rates.call + call.num_runs * call.length * rates.row for call in table.calls) + states * rates.state


def contents(table):
    return table.calls, table.rows.tolist(), table.places.tolist(), table.parents.tolist()


def test_the_drawing_with_forks_at_every_branch():
    table = runs_of_segments(*DRAWN, min_saved=2, rates=CALLS_ONLY)
    assert contents(table) == (
        (RunCall(1, 3, 1, ()), RunCall(1, 2, 1, ((0, 1),)), RunCall(3, 3, 0, ((0, 1), (1, 2)))),
        [0, 1, 2, 3, 4, 10, 11, 11, 5, 6, 6, 7, 8, 9],  # A, B, then E, C, D of which the first two are padded
        [0, 1, 2, 3, 4, 8, 9, 11, 12, 13, 5, 6],
        [0, 0, 0, 0],
    )
    assert cost_of(table, RunCost(call=100.0, row=1.0, state=0.01)) == pytest.approx(3 * 100 + 14 + 0.06)
    assert {array.dtype for array in (table.rows, table.places, table.parents)} == {torch.int64}
    host_ints = [x for call in table.calls for x in (*call[:3], *(y for pair in call.sources for y in pair))]
    assert {*map(type, host_ints)} == {int}


@pytest.mark.parametrize(
    ("sequences", "calls", "rows"),
    [
        pytest.param([], (), [], id="no sequence"),
        pytest.param([[]], (), [], id="an empty one"),
        pytest.param([[7]], (RunCall(1, 1, 0, ()),), [0], id="one token"),
        pytest.param([[7], [7], [7]], (RunCall(1, 1, 0, ()),), [0], id="one token, three times"),
        pytest.param([[7], [8], [9]], (RunCall(3, 1, 0, ()),), [0, 1, 2], id="single tokens"),
        pytest.param([[7, 8, 9]] * 2, (RunCall(1, 3, 0, ()),), [0, 1, 2], id="identical"),
        pytest.param([[7, 8], [7, 8, 9]], (RunCall(1, 3, 0, ()),), [0, 1, 2], id="a prefix"),
        pytest.param(
            [[7, 1], [7, 2], [7, 3]],
            (RunCall(3, 2, 0, ()),),
            [0, 1, 0, 2, 0, 3],
            id="a first token is too short to fork, however many follow",
        ),
        pytest.param(
            [[7, 8, 9, 1], [7, 8, 9, 2]],
            (RunCall(1, 3, 1, ()), RunCall(2, 2, 0, ((0, 2),))),
            [0, 1, 2, 3, 3, 4, 4],
            id="three tokens are not, and one row after them is padded",
        ),
    ],
)
def test_small_batches(sequences, calls, rows):
    table = runs_of_segments(*segments_of(sequences), min_saved=2, rates=FREE_FORKS)
    assert (table.calls, table.rows.tolist()) == (calls, rows)
    assert contents(cheapest_runs(*segments_of(sequences), FREE_FORKS)) == contents(table)


plans = {
    "sequences": ragged_batches(min_length=0, min_sequences=0, max_length=16),
    "options": st.fixed_dictionaries(
        {"min_shared_tokens": st.sampled_from([1, 1, 2, 3]), "pad_to_multiple_of": st.sampled_from([None, None, 4, 16])}
    ),
    "rates": st.builds(
        RunCost, call=st.sampled_from([0.0, 1.0, 8.0]), row=st.just(1.0), state=st.sampled_from([0.0, 0.5, 2.0])
    ),
}
forks = {"min_saved": st.sampled_from([None, 2, 2, 3, 6, 10])}


@settings(max_examples=200, deadline=None)
@given(**plans, **forks)
@example(DEEP, {}, FREE_FORKS, 2)
@example(COMB, {}, FREE_FORKS, 2)
@example(COMB, {}, CALLS_ONLY, 6)
def test_every_run_is_on_the_root_path_of_its_rows(sequences, options, rates, min_saved):
    """No row missing, none twice, the order right; and each row has its output from one place in one run."""
    starts, parents = segments_of(sequences, **options)
    table, paths = runs_of_segments(starts, parents, min_saved, rates), root_paths(starts, parents)
    calls = runs_in(table)
    for run in (run for call in calls for run in call):
        assert run.path == paths[run.rows[-1]]
    assert len(table.places) == len(paths)
    assert table.rows[table.places].tolist() == list(range(len(paths)))
    assert {int(row) for row in table.rows} == set(range(len(paths)))
    leaves = [run.path for call, runs in zip(table.calls, calls, strict=True) if not call.keeps for run in runs]
    assert sorted(leaves) == sorted(leaf_paths(starts, parents))
    ends = np.cumsum([call.num_runs * call.length for call in table.calls])
    for row, place in enumerate(table.places.tolist()):
        number = int(np.searchsorted(ends, place, side="right"))
        call, begin = table.calls[number], int(ends[number]) - table.calls[number].num_runs * table.calls[number].length
        run = calls[number][(place - begin) // call.length]
        offset = (place - begin) % call.length
        assert offset < len(run.rows), "the output of padding is read"
        assert run.path[: len(run.path) - len(run.rows) + offset + 1] == paths[row]


@settings(max_examples=200, deadline=None)
@given(**plans, **forks)
@example(DEEP, {}, FREE_FORKS, 2)
@example(COMB, {}, FREE_FORKS, 6)
def test_forks_and_their_sources(sequences, options, rates, min_saved):
    table = runs_of_segments(*segments_of(sequences, **options), min_saved, rates)
    continued = [np.zeros(call.num_runs, dtype=np.int64) for call in table.calls]
    parents = iter(table.parents.tolist())
    for number, call in enumerate(table.calls):
        assert call.num_runs > 0 and call.length > 0
        sources = [source for source, _ in call.sources]
        assert sources == sorted(set(sources)), "each source once, in order"
        for source, count in call.sources:
            assert source < number and table.calls[source].keeps and count > 0
            for _ in range(count):
                continued[source][next(parents)] += 1
        if call.keeps:
            assert call.length >= 2
        else:
            assert not any(later.keeps for later in table.calls[number:]), "leaves come last"
        assert call.length >= 2 or not call.sources, "one row after a state is a step of generation"
    num_kept = 0
    for call, times in zip(table.calls, continued, strict=True):
        num_kept += call.num_runs * call.keeps
        # A fork shorter than what it must save is worth it only if more than two runs continue it.
        assert not call.keeps or (call.length * (times - 1) >= min_saved).all(), "a state that nothing needs is kept"
        assert call.keeps or not times.any()
    assert table.num_forks == num_kept
    assert not (min_saved is None and num_kept)


@settings(max_examples=100, deadline=None)
@given(**plans)
@example(DEEP, {}, RunCost())
@example([[*range(300), 1], [*range(300), 2], [*range(300), 3, 3]], {}, RunCost())
def test_the_cheapest_is_not_dearer_than_any_choice(sequences, options, rates):
    segments = segments_of(sequences, **options)
    costs = [cost_of(runs_of_segments(*segments, saved, rates), rates) for saved in (None, *MIN_SAVED)]
    assert cost_of(cheapest_runs(*segments, rates), rates) == min(costs)


def test_by_default_a_fork_has_to_save_about_a_hundred_rows():
    def num_forks(prompt):
        return cheapest_runs(*segments_of([[*range(prompt), 900], [*range(prompt), 901]])).num_forks

    assert [num_forks(prompt) for prompt in (40, 60, 150, 400)] == [0, 0, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    rates=st.builds(RunCost, call=st.sampled_from([0.0, 3.0, 20.0]), row=st.just(1.0), state=st.just(0.0)),
)
def test_leaves_are_put_into_the_calls_that_cost_least(lengths, rates):
    """Against every way to cut the sorted lengths."""
    table = runs_of_segments(*segments_of([[n, *[0] * (length - 1)] for n, length in enumerate(lengths)]), 2, rates)
    ordered, count = sorted(lengths), len(lengths)
    cuts = [cut for size in range(count) for cut in combinations(range(1, count), size)]
    ways = [[0, *cut, count] for cut in cuts]
    costs = [sum(rates.call + (end - start) * ordered[end - 1] for start, end in pairwise(way)) for way in ways]
    assert cost_of(table, rates) == min(costs)
