"""The tests are tested: mistakes in the runs and states of recurrent layers, each of which makes the suite fail."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, cat

import radixtrain.hf.recurrent
import radixtrain.tree.layout
import radixtrain.tree.runs
from radixtrain import verify_equivalence
from radixtrain.hf.guards import model as trial
from radixtrain.hf.recurrent import ForkedStates
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import RunGroup, RunLayout, runs_of_segments
from radixtrain.verification.equivalence import EquivalenceReport
from tests.claims.equivalence.ways import with_runs
from tests.claims.mistakes import assert_caught, plant
from tests.support.models import NEEDS_FORKS, tiny_model

pytestmark = NEEDS_FORKS
UNTRIED = pytest.mark.usefixtures("without_the_trial")

# Two prompts of four and two tokens; two branches of three below the first, with two leaves each.
SEQUENCES = [
    *([7, 8, 9, 10, 1, 1, 1, 2, 3], [7, 8, 9, 10, 1, 1, 1, 4, 2, 2]),
    *([7, 8, 9, 10, 5, 6, 5, 3], [7, 8, 9, 10, 5, 6, 5, 6, 6, 1]),
    *([20, 21, 22, 23, 24], [20, 21, 25, 26]),
]
FEATURES = [{"input_ids": ids, "labels": ids} for ids in SEQUENCES]
Table = Callable[[], RunLayout]


@pytest.fixture(scope="module")
def model() -> Any:
    """A layer of the gated delta rule, which has a convolution and a state, and one that attends."""
    return tiny_model("Qwen3_5ForCausalLM")


def table(min_saved: int = 2) -> RunLayout:
    """A fork at every branch; with 4, only below the longer prompt, and the rows of its branches are computed twice."""
    ids = np.concatenate(SEQUENCES)
    plan = build_prefix_plan(ids, np.cumsum([0, *map(len, SEQUENCES)]))
    return runs_of_segments(plan.segment_starts, plan.segment_parents, min_saved, group_cost=0.0)


def verdict(model: Any, table_of: Table) -> EquivalenceReport:
    with with_runs(lambda layout: table_of()):
        return verify_equivalence(model, FEATURES)


def with_rows(right: RunLayout, groups: Sequence[RunGroup], rows: Any) -> RunLayout:
    """Other groups and rows; each row has its output from the first run that contains it."""
    return replace(
        right,
        groups=tuple(groups),
        rows=torch.tensor(rows),
        outputs=torch.from_numpy(np.unique(rows, return_index=True)[1]),
    )


def test_the_runs_that_are_mutated() -> None:
    """Prompts of two lengths, then both branches in one group, from one state."""
    for min_saved, kept in ((2, [(1, 2), (1, 4), (2, 3)]), (4, [(1, 4)])):
        assert [(group.num_runs, group.length) for group in table(min_saved).groups if group.is_fork] == kept


@UNTRIED
@pytest.mark.parametrize("min_saved", [2, 4])
def test_without_a_mutation(model: Any, min_saved: int) -> None:
    report = verdict(model, partial(table, min_saved))
    assert report.passed and report.conclusive, str(report)


def a_fork_from_the_wrong_parent() -> RunLayout:
    """The leaves of one branch start from the other."""
    right = table()
    assert right.groups[-1].sources == (0, 2), "the states of a leaf are that of the shorter prompt, and two branches'"
    return replace(right, parents=torch.where(right.parents > 0, 3 - right.parents, 0))


def a_state_kept_after_the_wrong_row() -> RunLayout:
    """Every leaf computes the last row of its fork again, which is in the state that it starts from."""
    right = table()
    runs, parents = iter(runs_in(right)), iter(right.parents.tolist())
    groups: list[RunGroup] = []
    rows: list[int] = []
    last_rows: list[list[int]] = []
    for group in right.groups:
        own = [next(runs) for _ in range(group.num_runs)]
        last_rows.append([run[-1] for run in own])
        above = [row for source in group.sources for row in last_rows[source]]
        parents_of_own = [next(parents) for _ in own if above]
        if above and not group.is_fork:
            own = [[above[parent], *run] for parent, run in zip(parents_of_own, own, strict=True)]
            group = group._replace(length=group.length + 1)
        groups.append(group)
        rows += [row for run in own for row in run]
    return with_rows(right, groups, rows)


def rows_after_a_fork_left_out() -> RunLayout:
    """A leaf has only the rows that no run before it has."""
    right = table(min_saved=4)
    seen: set[int] = set()
    rows: list[int] = []
    for run in runs_in(right):
        own = [row for row in dict.fromkeys(run) if row not in seen]
        seen.update(own)
        rows += [*own, *own[-1:] * (len(run) - len(own))]
    return with_rows(right, right.groups, rows)


def all_rows_as_one_sequence() -> RunLayout:
    """As a recurrent layer reads a packed batch: every branch after the ones before it."""
    rows = torch.arange(len(table().outputs))
    return RunLayout(groups=(RunGroup(1, len(rows), False, ()),), rows=rows, outputs=rows, parents=rows[:0])


def segments_from_nothing() -> RunLayout:
    """No run continues another."""
    right = table()
    return replace(right, groups=tuple(group._replace(sources=()) for group in right.groups), parents=right.parents[:0])


@UNTRIED
@pytest.mark.parametrize(
    "mutated",
    [
        a_fork_from_the_wrong_parent,
        a_state_kept_after_the_wrong_row,
        rows_after_a_fork_left_out,
        all_rows_as_one_sequence,
        segments_from_nothing,
    ],
    ids=lambda mutated: mutated.__name__,
)
def test_mutated_runs(model: Any, mutated: Table) -> None:
    assert_caught(verdict(model, mutated))


@UNTRIED
def test_a_final_state_read_through_padding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of one level in one group, whatever their lengths."""

    def by_level(real: Any, runs: Sequence[Any]) -> Iterator[list[int]]:
        forks = sorted((run.level, number) for number, run in enumerate(runs) if run.is_fork)
        for _, group in groupby(forks, key=lambda fork: fork[0]):
            yield [number for _, number in group]

    plant(monkeypatch, radixtrain.tree.runs, "_fork_groups", by_level)
    assert [(group.num_runs, group.length) for group in table().groups if group.is_fork] == [(2, 4), (2, 3)]
    assert_caught(verdict(model, table))


def forget_the_left_context(real: Any, self: ForkedStates, *args: Any, **options: Any) -> Tensor:
    """A convolution reads zeros before the first row of a run."""
    self.past = {kind: state for kind, state in self.past.items() if kind[0] != "conv"}
    return real(self, *args, **options)


def miss_one_child(kind: str) -> Callable[..., Any]:
    """Each state has its gradient from all of its children but the first of a group."""

    def mistake(real: Any, *args: Any) -> Any:
        return {key: cat([x[:1].detach(), x[1:]]) if key[0] == kind else x for key, x in real(*args).items()}

    return mistake


OF_STATES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a convolution that forgets its left context": (ForkedStates, "update_conv_state", forget_the_left_context),
    "a gradient that misses one child, convolution": (radixtrain.hf.recurrent, "_past", miss_one_child("conv")),
    "a gradient that misses one child, state": (radixtrain.hf.recurrent, "_past", miss_one_child("recurrent")),
}


@UNTRIED
@pytest.mark.parametrize("name", OF_STATES)
def test_mutated_states(model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, *OF_STATES[name])
    report = verdict(model, table)
    is_right = report["float64"].loss not in report["float64"].failed
    assert is_right == name.startswith("a gradient"), "the forward pass of a wrong gradient is right"
    assert_caught(report)


@pytest.mark.parametrize("name", OF_STATES)
def test_mutated_states_are_not_even_used(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The trial of the model finds them, and its recurrent layers compute whole sequences."""
    plant(monkeypatch, *OF_STATES[name])
    trial._judged.clear()
    report = verdict(model, table)
    assert report.passed and report.conclusive, str(report)
    assert "computes every sequence from its first token on" in caplog.text


def runs_in(given: RunLayout) -> Iterator[list[int]]:
    rows = iter(given.rows.tolist())
    for group in given.groups:
        for _ in range(group.num_runs):
            yield [next(rows) for _ in range(group.length)]
