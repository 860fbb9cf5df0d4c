"""The passes of a step: what runs before what, every row and every label once, none above the budget.

What a batch computes is read from its paths: the tokens and positions up to each row, those of its context from the
micro-batch that keeps them.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batch_contents import as_python
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import tries

from radixtrain.collators.batching import UNIQUE_TOKENS
from radixtrain.collators.passes import Keeping, Schedule, Span
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.collators.targets import features_once
from radixtrain.testing import ragged_batches
from radixtrain.tree.arrays import cumulative
from radixtrain.tree.cost_model import Rates, StepCost
from radixtrain.tree.sorting import sort_sequences

N = -100
Features = list[dict[str, Any]]
KEEP = StepCollator(share_across_micro_batches=True)


def schedule_of(sequences: list[list[int]], max_tokens: int | None, keeping: Keeping | None = None) -> Schedule:
    ids = np.array([token for sequence in sequences for token in sequence])
    by_order = sort_sequences(ids, cumulative(np.array([len(sequence) for sequence in sequences])))
    return (keeping or Keeping.of(True, None, holds_graph=False)).schedule(by_order, max_tokens, UNIQUE_TOKENS)


def order_of(schedule: Schedule) -> str:
    """K0 is a kept pass that only goes forward, k0 the same one training, m0 a micro-batch."""
    letters = {(True, False): "K", (True, True): "k", (False, True): "m"}
    return " ".join(f"{letters[event.is_kept, event.trains]}{event.place}" for event in schedule.order)


P = [7, 7, 7]


@pytest.mark.parametrize(
    ("sequences", "max_tokens", "kept", "groups", "num_kept", "order", "cost"),
    [
        pytest.param([[*P, 1, 1], [*P, 2, 2]], 3, [(0, 0, 3)], [[0], [1]], [3, 3], "K0 m0 m1 k0", 8, id="a prompt"),
        pytest.param([[*P, 1, 1], [*P, 2, 2]], None, [], [[0, 1]], [0, 0], "m0", 7, id="no budget"),
        pytest.param([[*P, 1, 1], [*P, 2, 2]], 7, [], [[0, 1]], [0, 0], "m0", 7, id="all fit"),
        pytest.param([[1, 1], [2, 2], [3, 3]], 2, [], [[0], [1], [2]], [0, 0, 0], "m0 m1 m2", 6, id="nothing shared"),
        pytest.param(
            [[*P, 1, 1], [*P, 2, 2]],
            2,
            [(0, 0, 1), (0, 1, 3)],
            [[0], [1]],
            [3, 3],
            "K0 K1 m0 m1 k1 k0",
            8,
            id="a prompt of two passes",
        ),
        pytest.param(
            [[1, 2, 3, 4, 5, 6, 7]],
            3,
            [(0, 0, 2), (0, 2, 4)],
            [[0]],
            [4],
            "K0 K1 m0 k1 k0",
            8,
            id="a long sequence",
        ),
        pytest.param(
            [[*P, 1, 1, 1], [*P, 1, 1, 2], [*P, 3, 3, 3], [*P, 3, 3, 4], [9, 9]],
            2,
            [(0, 0, 1), (0, 1, 3), (0, 3, 5), (2, 3, 5)],
            [[0], [1, 2], [3], [4]],
            [5, 5, 5, 5, 0],
            "K0 K1 K2 m0 K3 m1 k2 m2 k3 k1 k0 m3",
            15,
            id="two levels",
        ),
        pytest.param([[5, 5]] * 4, 1, [(0, 0, 1)], [[0, 1, 2, 3]], [1] * 4, "K0 m0 k0", 2, id="copies"),
    ],
)
def test_a_schedule(sequences, max_tokens, kept, groups, num_kept, order, cost):
    found = schedule_of(sequences, max_tokens)
    assert found.kept == [Span(*span) for span in kept]
    assert found.groups == groups
    assert [found.num_kept[index] for index in range(len(sequences))] == num_kept
    assert order_of(found) == order
    assert found.cost == cost


@st.composite
def features(draw):
    """Labels anywhere; in half of the steps positions of their own, so that equal tokens differ; half with floats."""
    sequences, has_positions, has_floats = draw(ragged_batches()), draw(st.booleans()), draw(st.booleans())
    made: Features = []
    for ids in sequences:
        made.append({"input_ids": ids, "labels": [draw(st.sampled_from([N, 0, 1, 2])) for _ in ids]})
        if has_positions:
            start = draw(st.sampled_from([0, 3]))
            made[-1]["position_ids"] = list(range(start, start + len(ids)))
        if has_floats:
            made[-1] |= {name: [draw(st.sampled_from([0.5, -1.0, 2.0])) for _ in ids] for name in FLOATS}
    return made


FLOATS = ["loss_weights", "old_logprobs", "advantages"]


def expected_predictions(features: Features) -> Counter[Any]:
    """(history of the predictor, label, the policy's floats) -> the weight of its entries."""
    found: Counter[Any] = Counter()
    for feature in features:
        ids, labels = (np.array(feature[name]).tolist() for name in ("input_ids", "labels"))
        positions = np.array(feature.get("position_ids", range(len(ids)))).tolist()
        history = list(zip(ids, positions, strict=True))
        for n in range(1, len(ids)):
            weight, *floats = (float(feature[name][n]) if name in feature else None for name in FLOATS)
            if labels[n] != N:
                found[tuple(history[:n]), labels[n], *floats] += 1 if weight is None else weight
    return found


def histories_of(step: Step) -> list[list[tuple[tuple[int, int], ...]]]:
    """Of every row of each micro-batch: the (token, position) pairs that it attends to, in order. No padding."""
    found: list[list[tuple[tuple[int, int], ...]]] = []
    for batch in step.micro_batches:
        layout = batch["radix"].layout
        own = list(zip(batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist(), strict=True))
        sources = batch["radix"].sources
        context = [history for place, start, end in sources for history in found[place][start:end]]
        assert len(context) == (layout.context.num_rows if layout.context else 0)
        keys, rows = layout.path_keys.tolist(), list[tuple[tuple[int, int], ...]]()
        for q0, q1, k0, k1 in layout.paths.bounds:
            path = keys[k0:k1]
            kept = [key - len(own) for key in path if key >= len(own)]
            assert path[: len(kept)] == [key + len(own) for key in kept], "the context comes first"
            assert [context[key] for key in kept] == [context[kept[-1]][: n + 1] for n in range(len(kept))]
            pairs = [*(context[key][-1] for key in kept), *(own[key] for key in path[len(kept) :])]
            rows += [tuple(pairs[: len(path) - (q1 - q0) + n + 1]) for n in range(q1 - q0)]
        found.append(rows[: layout.inverse_indices.unique().numel()])  # without padding
    return found


def predictions(step: Step) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for batch, rows in zip(step.micro_batches, histories_of(step), strict=True):
        entries = [batch["radix"].prediction_rows, batch["shift_labels"][0], batch["radix"].loss_weights]
        floats = [getattr(batch["radix"], name) for name in FLOATS[1:]]
        columns = [[None] * len(entries[0]) if each is None else each.tolist() for each in (*entries, *floats)]
        predictors = batch["radix"].predictor_indices.tolist()
        for row, label, weight, *rest in zip(*columns, strict=True):
            if weight:
                found[rows[predictors[row]], label, *rest] += weight
    return found


def rows_computed(step: Step) -> Counter[Any]:
    """Micro-batches that only fill up are left out."""
    last = len(step.micro_batches) - sum(not members for members in step.members[-1:])
    return Counter(row for rows in histories_of(step)[:last] for row in rows)


def unique_rows(features: Features) -> set[Any]:
    sequences = [list(zip(f["input_ids"], f.get("position_ids", range(99)), strict=False)) for f in features]
    return {tuple(pairs[: n + 1]) for pairs in sequences for n in range(len(pairs))}


def assert_in_order(step: Step) -> None:
    """A pass runs first without training if others continue it, and trains after all of them; each trains once."""
    events = [tuple(each) for each in step.passes]
    assert sorted(place for place, trains in events if trains) == list(range(len(step.micro_batches)))
    for place, batch in enumerate(step.micro_batches):
        for source in {source for source, *_ in batch["radix"].sources}:
            begin, end = events.index((source, False)), events.index((source, True))
            mine = [when for when, event in enumerate(events) if event[0] == place]
            assert begin < min(mine) and max(mine) < end
    read = {source for batch in step.micro_batches for source, *_ in batch["radix"].sources}
    assert {place for place, trains in events if not trains} == read, "nothing is kept that no one reads"


OPTIONS = [
    {},
    {"pad_to_multiple_of": 3},
    {"min_shared_tokens": 3},
    {"min_shared_tokens": 4, "pad_to_multiple_of": 2},
    {"shared_targets": "once"},
]
BUDGETS = st.sampled_from([3, 4, 6, 9, None])


@example([{"input_ids": [3] * 10, "labels": [3] * 10}], 3, {}, True)
@settings(max_examples=tries(500, 20_000), deadline=None)
@given(features(), BUDGETS, st.sampled_from(OPTIONS), st.booleans())
def test_every_row_and_every_label_once_and_none_above_the_budget(features, max_tokens, options, holds_graph):
    step = replace(KEEP, max_tokens=max_tokens, holds_graph=holds_graph, **options)(features)
    assert all(batch["input_ids"].numel() <= (max_tokens or 1000) for batch in step.micro_batches)
    assert_in_order(step)
    wanted = features_once(features) if options.get("shared_targets") == "once" else features
    expected = expected_predictions(wanted)
    assert_same(predictions(step), expected)
    if not any("loss_weights" in feature for feature in features):
        assert step.num_labels == sum(expected.values())
    rows = rows_computed(step)
    assert rows.keys() == unique_rows(features)
    if options.get("min_shared_tokens", 1) == 1:
        assert set(rows.values()) == {1}
        assert sum(rows.values()) == step.num_unique_tokens
    if "pad_to_multiple_of" not in options:
        assert step.num_computed_tokens == sum(rows.values())


def assert_same(found: Counter[Any], expected: Counter[Any]) -> None:
    """Weights of both signs may add up to nothing, so that an entry has none."""
    assert {key: value for key, value in found.items() if value} == {k: v for k, v in expected.items() if v}


@settings(max_examples=tries(200, 5_000), deadline=None)
@given(features(), st.sampled_from([3, 6, 9]), st.sampled_from([2, 3, 7]), st.sampled_from(OPTIONS))
def test_ranks_run_passes_of_the_same_kind_at_the_same_time(features, max_tokens, num_ranks, options):
    one = replace(KEEP, max_tokens=max_tokens, num_ranks=num_ranks, **options)
    steps = [replace(one, rank=rank)(features) for rank in range(num_ranks)]
    assert len({tuple(trains for _, trains in step.passes) for step in steps}) == 1
    assert len({step.num_losses for step in steps}) == 1
    wanted = features_once(features) if options.get("shared_targets") == "once" else features
    total: Counter[Any] = Counter()
    for step in steps:
        total.update(predictions(step))
    assert_same(total, expected_predictions(wanted))
    for step in steps:
        assert all(batch["input_ids"].numel() <= max_tokens for batch in step.micro_batches)
        assert len(step.members) == len(step.micro_batches)


def prompts(length: int, tails: list[int]) -> list[list[int]]:
    return [[*range(100, 100 + length), *range(1000 * (n + 1), 1000 * (n + 1) + tail)] for n, tail in enumerate(tails)]


class TestWhetherItPays:
    """A prompt of n that two micro-batches continue saves n of its U + n rows."""

    @pytest.mark.parametrize(("tails", "is_kept"), [([47, 47], True), ([47, 48], False)], ids=["3 %", "2.97 %"])
    def test_from_three_percent_on(self, tails, is_kept):
        """3 rows of 100, and of 101."""
        found = schedule_of(prompts(3, tails), 51, Keeping(1, 0, 0.03, True))
        assert bool(found.kept) == is_kept and len(found.groups) == 2

    def test_a_second_forward_pass_counts(self):
        """It saves 10 of 60 rows; computed again forward they cost a third of that, and passes cost as rows do."""
        sequences = prompts(10, [20, 20])
        assert schedule_of(sequences, 30, Keeping(1, 0, 0.16, True)).kept
        assert not schedule_of(sequences, 30, Keeping(1, 0, 0.17, True)).kept
        assert schedule_of(sequences, 30, Keeping(1, 0, 0.11, False)).kept
        assert not schedule_of(sequences, 30, Keeping(1, 0, 0.12, False)).kept
        assert schedule_of(sequences, 30, Keeping(1, 2, 0.05, True)).kept  # two passes more
        assert not schedule_of(sequences, 30, Keeping(1, 6, 0.0, True)).kept

    def test_a_prefix_of_fewer_rows_is_not_tried(self):
        assert schedule_of(prompts(10, [20, 20]), 30, Keeping(10, 0, 0.03, True)).kept
        assert not schedule_of(prompts(10, [20, 20]), 30, Keeping(11, 0, 0.03, True)).kept

    def test_a_long_sequence_is_cut_whatever_it_costs(self):
        assert schedule_of([[*range(40)], [7]], 30, Keeping(None, 10**6, 0.9, False)).kept == [Span(0, 0, 10)]

    def test_a_graph_is_held_if_there_is_room(self):
        """Five answers of 10 rows: micro-batches of 30 have room for three, and for two beside a prompt of 10."""
        sequences = prompts(10, [10] * 5)
        found = {holds: schedule_of(sequences, 30, Keeping(1, 0, -math.inf, holds)) for holds in (True, False, "auto")}
        assert [len(each.groups) for each in found.values()] == [2, 2, 3]
        assert [each.holds_graph for each in found.values()] == [True, False, True]
        tight = schedule_of(sequences, 19, Keeping(1, 0, -math.inf, "auto"))
        assert tight.kept and not tight.holds_graph  # prompt and answer are 20

    def test_by_the_costs_of_a_model(self):
        rates = Rates(call=3e-6, rectangle=0.0, pair=0.0, element=0.0, flop=1e-9)
        cost = StepCost(rates=rates, on_host=True, num_heads=4, num_key_value_heads=2, head_dim=8, row_flops=2000.0)
        assert Keeping.of("auto", cost, holds_graph=False) == Keeping(24, 12, 0.03, False)
        assert Keeping.of("auto", cost, holds_graph=True) == Keeping(24, 12, 0.03, True)
        assert Keeping.of("auto", None, holds_graph=True) == Keeping(None, 0, 0.03, True)
        assert Keeping.of(True, cost, holds_graph=True) == Keeping(1, 0, -math.inf, True)
        assert Keeping.of(False, cost, holds_graph=True) is None


def costs(call: float) -> StepCost:
    """A row of a layer takes 1 us."""
    rates = Rates(call=call, rectangle=0.0, pair=0.0, element=0.0, flop=1e-9)
    return StepCost(rates=rates, on_host=True, num_heads=4, num_key_value_heads=2, head_dim=8, row_flops=1000.0)


LONG_PROMPT = [{"input_ids": ids, "labels": ids} for ids in prompts(60, [30, 30, 30])]
UNRELATED = [{"input_ids": [n] * 60, "labels": [n] * 60} for n in range(3)]


@pytest.mark.parametrize(
    ("rows", "step_cost", "is_kept"),
    [
        pytest.param(LONG_PROMPT, costs(call=1e-7), True, id="cheap calls"),
        pytest.param(LONG_PROMPT, costs(call=1e-4), False, id="dear calls"),
        pytest.param(LONG_PROMPT, None, False, id="costs that are not known"),
        pytest.param(UNRELATED, costs(call=1e-7), False, id="nothing shared"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_auto_keeps_what_pays_and_leaves_all_else_as_it_is(rows, step_cost, is_kept, num_ranks):
    without = StepCollator(max_tokens=100, step_cost=step_cost, num_ranks=num_ranks)
    steps = [replace(without, share_across_micro_batches=wanted)(rows * num_ranks) for wanted in (False, "auto")]
    assert any(not trains for _, trains in steps[1].passes) == is_kept or num_ranks > 1
    if not is_kept:
        assert steps[0].passes == steps[1].passes and steps[0].members == steps[1].members
        assert [*map(as_python, steps[0].micro_batches)] == [*map(as_python, steps[1].micro_batches)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dedup": False}, "share_across_micro_batches needs dedup and merge_labels"),
        ({"merge_labels": False}, "share_across_micro_batches needs dedup and merge_labels"),
        ({"max_tokens": 4, "pad_to_multiple_of": 8}, "needs max_tokens of at least pad_to_multiple_of, 8; it is 4"),
        (
            {"step_cost": replace(costs(1e-7), strategies=("expand",))},
            "needs attention auto, cascade or path, and step_cost is of expand",
        ),
    ],
    ids=["padded", "not merged", "padding", "attention"],
)
def test_what_it_needs(options, message):
    """Asked for, it is refused; `auto` leaves it off."""
    with pytest.raises(ValueError, match=message):
        StepCollator(share_across_micro_batches=True, **options)
    long = [{"input_ids": [*range(1, 10)], "labels": [*range(1, 10)]}]
    options = {"max_tokens": 4, **options}
    step, without = (StepCollator(share_across_micro_batches=wanted, **options)(long) for wanted in ("auto", False))
    assert (step.passes, step.members) == (without.passes, without.members)


@pytest.mark.parametrize("name", ["share_across_micro_batches", "holds_graph"])
def test_another_word_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be true, false or auto: 'yes'"):
        StepCollator(**{name: "yes"})
