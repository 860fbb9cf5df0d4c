"""Runs against the root paths of the segments: whatever is forked, each row follows exactly the rows above it."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixtrain.testing import ragged_batches
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.runs import RunGroup, runs_of_segments, tree_runs
from tests.support.batches import DEEP, plan_of

FEW_GROUPS = 1000.0  # the cost of a group
# The drawing of the module: A = [0, 3), B = [3, 5), C = [5, 7), D = [7, 10), E = [10, 12).
DRAWN = np.array([0, 3, 5, 7, 10, 12]), np.array([-1, 0, 1, 1, 0])
COMB = [[*[1] * teeth, 2] for teeth in range(12)]


class Run(NamedTuple):
    """A run of a table: its rows without padding, and those of all runs above it before them."""

    rows: list[int]
    path: list[int]


def segments_of(sequences, **options):
    plan = plan_of(sequences, **options)
    return plan.segment_starts, plan.segment_parents


def runs_in(table):
    """The runs of a table, group by group, walked as a layer walks them, and how many later runs continue each of them.

    Contradictions fail.
    """
    rows, parents, runs, continued = iter(table.rows.tolist()), iter(table.parents.tolist()), [], []
    for group in table.groups:
        stored = [(source, place) for source in group.sources for place in range(len(runs[source]))]
        used = [stored[next(parents)] for _ in range(group.num_runs * bool(stored))]
        assert sorted({source for source, _ in used}) == sorted(group.sources), "a state that nothing needs, or twice"
        for source, place in used:
            assert table.groups[source].is_fork
            continued[source][place] += 1
        paths = [runs[source][place].path for source, place in used] or [[]] * group.num_runs
        given_rows = [[next(rows) for _ in range(group.length)] for _ in range(group.num_runs)]
        unpadded = [list(dict.fromkeys(run)) for run in given_rows]
        assert [run + run[-1:] * (group.length - len(run)) for run in unpadded] == given_rows, "padding is the last row"
        assert all(len(run) == group.length for run in unpadded) or not group.is_fork, "a final state after padding"
        runs.append([Run(run, [*path, *run]) for path, run in zip(paths, unpadded, strict=True)])
        continued.append(np.zeros(group.num_runs, dtype=np.int64))
    assert not list(rows) and not list(parents)
    return runs, continued


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


def num_forks(table):
    return sum(group.num_runs for group in table.groups if group.is_fork)


def contents(table):
    return table.groups, table.rows.tolist(), table.outputs.tolist(), table.parents.tolist()


def test_the_drawing_with_forks_at_every_branch():
    table = runs_of_segments(*DRAWN, min_saved=2, group_cost=FEW_GROUPS)
    assert contents(table) == (
        (RunGroup(1, 3, True, ()), RunGroup(1, 2, True, (0,)), RunGroup(3, 3, False, (0, 1))),
        [0, 1, 2, 3, 4, 7, 8, 9, 5, 6, 6, 10, 11, 11],  # A, B, then D, C, E of which the last two are padded
        [0, 1, 2, 3, 4, 8, 9, 5, 6, 7, 11, 12],
        [0, 1, 1, 0],
    )
    assert {array.dtype for array in (table.rows, table.outputs, table.parents)} == {torch.int64}
    assert {type(number) for group in table.groups for number in (*group[:2], *group.sources)} == {int}


@pytest.mark.parametrize(
    ("sequences", "groups", "rows"),
    [
        pytest.param([], (), [], id="no sequence"),
        pytest.param([[]], (), [], id="an empty one"),
        pytest.param([[7]], (RunGroup(1, 1, False, ()),), [0], id="one token"),
        pytest.param([[7], [7], [7]], (RunGroup(1, 1, False, ()),), [0], id="one token, three times"),
        pytest.param([[7], [8], [9]], (RunGroup(3, 1, False, ()),), [0, 1, 2], id="single tokens"),
        pytest.param([[7, 8, 9]] * 2, (RunGroup(1, 3, False, ()),), [0, 1, 2], id="identical"),
        pytest.param([[7, 8], [7, 8, 9]], (RunGroup(1, 3, False, ()),), [0, 1, 2], id="a prefix"),
        pytest.param(
            [[7, 1], [7, 2], [7, 3]],
            (RunGroup(3, 2, False, ()),),
            [0, 1, 0, 2, 0, 3],
            id="a first token is too short to fork, however many follow",
        ),
        pytest.param(
            [[7, 8, 9, 1], [7, 8, 9, 2]],
            (RunGroup(1, 3, True, ()), RunGroup(2, 2, False, (0,))),
            [0, 1, 2, 3, 3, 4, 4],
            id="three tokens are not, and one row after them is padded",
        ),
    ],
)
def test_small_batches(sequences, groups, rows):
    table = runs_of_segments(*segments_of(sequences), min_saved=2, group_cost=0.0)
    assert (table.groups, table.rows.tolist()) == (groups, rows)


@settings(max_examples=200, deadline=None)
@given(
    sequences=ragged_batches(min_length=0, min_sequences=0, max_length=16),
    options=st.fixed_dictionaries(
        {"min_shared_tokens": st.sampled_from([1, 1, 2, 3]), "pad_to_multiple_of": st.sampled_from([None, None, 4, 16])}
    ),
    min_saved=st.sampled_from([None, 2, 2, 3, 6, 10]),
    group_cost=st.sampled_from([0.0, 1.0, 8.0]),
)
@example(DEEP, {}, 2, 0.0)
@example(COMB, {}, 2, 0.0)
@example(COMB, {}, 6, 0.0)
@example(COMB, {}, 6, FEW_GROUPS)
def test_every_run_is_on_the_root_path_of_its_rows(sequences, options, min_saved, group_cost):
    """No row missing, none twice, the order right; each row has its output from one place in one run; forks pay."""
    starts, parents = segments_of(sequences, **options)
    table, paths = runs_of_segments(starts, parents, min_saved, group_cost=group_cost), root_paths(starts, parents)
    groups, continued = runs_in(table)
    for run in (run for runs in groups for run in runs):
        assert run.path == paths[run.rows[-1]]
    assert table.rows[table.outputs].tolist() == list(range(len(paths)))
    assert {int(row) for row in table.rows} == set(range(len(paths)))
    leaves = [run.path for group, runs in zip(table.groups, groups, strict=True) if not group.is_fork for run in runs]
    assert sorted(leaves) == sorted(leaf_paths(starts, parents))
    ends = np.cumsum([group.num_runs * group.length for group in table.groups])
    for row, output in enumerate(table.outputs.tolist()):
        number = int(np.searchsorted(ends, output, side="right"))
        group = table.groups[number]
        begin = int(ends[number]) - group.num_runs * group.length
        run, offset = groups[number][(output - begin) // group.length], (output - begin) % group.length
        assert offset < len(run.rows), "the output of padding is read"
        assert run.path[: len(run.path) - len(run.rows) + offset + 1] == paths[row]
    for number, (group, times) in enumerate(zip(table.groups, continued, strict=True)):
        assert group.num_runs > 0 and group.length > 0
        assert group.is_fork or not any(later.is_fork for later in table.groups[number:]), "leaves come last"
        assert group.length >= 2 or not (group.is_fork or group.sources), "one row after a state: a generation step"
        # A fork shorter than what it must save is worth it only if more than two runs continue it.
        assert not group.is_fork or (group.length * (times - 1) >= min_saved).all(), "a fork that saves too little"
    assert not (min_saved is None and num_forks(table))


def test_by_default_a_fork_has_to_save_32_rows():
    def forks(*lengths):
        """The runs of two branches below each of some prompts, on the device of the layout."""
        layout = TreeLayout.from_plan(
            plan_of([[n, *range(size), 900 + k] for n, size in enumerate(lengths) for k in (1, 2)])
        )
        return [num_forks(tree_runs(layout, are_on)) for are_on in (True, False)]

    assert [forks(size - 1) for size in (31, 32, 400)] == [[0, 0], [1, 0], [1, 0]]
    assert forks(30, 31, 60) == [2, 0]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), group_cost=st.sampled_from([0.0, 3.0, 20.0]))
def test_a_group_takes_leaves_until_its_padding_costs_more_than_another_group(lengths, group_cost):
    sequences = [[n, *[0] * (length - 1)] for n, length in enumerate(lengths)]
    table = runs_of_segments(*segments_of(sequences), 2, group_cost=group_cost)
    left, expected = sorted(lengths), []
    while left:
        fits = [n for n in range(1, len(left) + 1) if sum(left[-1] - length for length in left[-n:]) <= group_cost]
        expected.append((fits[-1], left[-1]))
        del left[-fits[-1] :]
    assert [(group.num_runs, group.length) for group in table.groups] == expected
