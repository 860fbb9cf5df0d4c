"""The counted work of each strategy against the calls that its kernel gets, and the choice that follows from it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import plan_of

from radixtrain.attention import tree_attention
from radixtrain.collators.radix import RadixCollator
from radixtrain.kernels.cpu_loops import TorchCPUKernel
from radixtrain.testing import ragged_batches
from radixtrain.tree.cost_model import (
    CANDIDATES,
    CHOICES,
    AttentionWork,
    Rates,
    StepCost,
    attention_work,
    paths_are_cheaper,
)
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.runs import RunCost

FREE = {"call": 0.0, "rectangle": 0.0, "pair": 0.0, "element": 0.0, "flop": 0.0}
DEEP = [[*range(100, 100 + 40 * n), 7] for n in range(1, 8)]


def cost(on_host=True, row_flops=0.0, strategies=CHOICES, attention_share=1.0, mixer_share=0.0, **rates):
    return StepCost(
        rates=Rates(**{**FREE, **rates}),
        on_host=on_host,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        row_flops=row_flops,
        strategies=strategies,
        attention_share=attention_share,
        mixer_share=mixer_share,
    )


def called(plan, strategy, monkeypatch):
    """Calls, rectangles and pairs that the CPU kernel computes forward."""
    seen = []
    forward = TorchCPUKernel.part_forward

    def counting(self, q, k, v, mask, scoring):
        seen.append((q.shape[0], q.shape[0] * q.shape[1] * k.shape[1]))
        return forward(self, q, k, v, mask, scoring)

    monkeypatch.setattr(TorchCPUKernel, "part_forward", counting)
    q, k, v = (torch.randn(plan.num_rows, heads, 8) for heads in (4, 2, 2))
    tree_attention(q, k, v, plan, attention=strategy, kernel="torch")
    return len(seen), sum(number for number, _ in seen), sum(pairs for _, pairs in seen)


def comb(levels, step, own, twigs=1):
    """A chat of turns of `step` tokens: after each of them `twigs` answers of `own` tokens."""
    return [[*range(step * n), *[10_000 + n] * own, twig] for n in range(1, levels + 1) for twig in range(twigs)]


@pytest.mark.parametrize(
    ("shape", "gathers"),
    [((1, 512, 64, 32), False), ((2, 512, 64, 16), False), ((4, 1024, 64, 8), False)]
    + [((levels, 100, 60), True) for levels in (19, 26, 49)],
)
def test_auto_on_a_device_gathers_the_paths_of_a_deep_tree(shape, gathers):
    """Each level is a call there. Heads of a model of 7 billion parameters."""
    layout = TreeLayout.from_plan(plan_of(comb(*shape))).to("meta")
    assert paths_are_cheaper(layout, 32, 8, 128) == gathers


@pytest.mark.parametrize("strategy", CHOICES)
@settings(max_examples=25, deadline=None)
@given(sequences=ragged_batches(max_length=200), min_shared_tokens=st.sampled_from([1, 3]))
def test_the_count_is_what_runs_on_the_host(strategy, sequences, min_shared_tokens):
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens)
    assume(strategy != "cascade" or TreeLayout.from_plan(plan).even_shape is None)  # that is one call of torch's own
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls, rectangles, pairs = called(plan, strategy, monkeypatch)
    work = attention_work(plan, strategy, on_host=True)
    assert (work.rectangles, work.pairs) == (rectangles, pairs)
    assert calls <= work.calls <= rectangles, "an upper bound, if equal rectangles lie unevenly"


def test_on_a_device_literally():
    """Trunk of 2, then 2 and 1 rows; paths of 4 and 3, sequences of 4 and 3."""
    plan = plan_of([[1, 2, 3, 4], [1, 2, 5]])
    counted = {strategy: attention_work(plan, strategy, on_host=False) for strategy in CHOICES}
    assert counted == {
        "cascade": AttentionWork(calls=2, rectangles=4, pairs=3 + 3 + 1 + 3 * 2, query_rows=3, key_rows=2),
        "path": AttentionWork(calls=1, rectangles=2, pairs=10 + 3, query_rows=0, key_rows=7),
        "expand": AttentionWork(calls=1, rectangles=2, pairs=10 + 6, query_rows=7 + 5, key_rows=7),
    }


def test_seconds_literally():
    """2 calls, 4 rectangles x 4 heads, 13 pairs x 4 heads x 8 columns, (3 x 4 + 2 x 2 x 2) x 8 elements."""
    plan = plan_of([[1, 2, 3, 4], [1, 2, 5]])
    expected = {"call": 2, "rectangle": 16, "pair": 416, "element": 160}
    for rate, number in expected.items():
        assert cost(on_host=False, **{rate: 1.0}).seconds(plan, "cascade") == number
    assert cost(on_host=False, row_flops=10.0, flop=2.0).seconds(plan, "cascade") == 5 * 20


class TestCheapest:
    def test_branches_are_left_out_if_calls_are_expensive(self):
        branchy = [[1, n, *range(100, 140)] for n in range(2, 12)]
        choice, plan = cost(call=1.0, strategies=("cascade",)).cheapest(lambda n: plan_of(branchy, min_shared_tokens=n))
        assert choice.min_shared_tokens > 1
        assert plan.num_segments == len(branchy)

    def test_plans_that_cannot_differ_are_not_built(self):
        asked = []

        def plan_of_long_runs(tokens):
            asked.append(tokens)
            return plan_of([[*range(100, 400), n] for n in range(2, 5)], min_shared_tokens=tokens)

        cost(call=1.0).cheapest(plan_of_long_runs)
        assert asked == [1]

    def test_plans_above_the_budget_are_left_out(self):
        branchy = [[1, n, *range(100, 140)] for n in range(2, 12)]
        fewest = plan_of(branchy).num_rows
        rates = cost(call=1.0, strategies=("cascade",))
        for budget in (fewest - 1, fewest):
            choice, plan = rates.cheapest(lambda n: plan_of(branchy, min_shared_tokens=n), budget)
            assert (choice.min_shared_tokens, plan.num_rows) == (1, fewest)


FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, n, *range(20, 60)] for n in range(2, 12))]


class TestRecurrentLayers:
    """A trunk of 40, then 4 leaves of 3: one call for the trunk and one for the leaves, and 5 states."""

    SEQUENCES = tuple([*range(100, 140), n, n, n] for n in range(4))
    FREE_RUNS = RunCost(call=0.0, row=0.0, state=0.0)

    @pytest.mark.parametrize(
        ("rates", "seconds"),
        [
            ({"call": 1e-3, "row": 1.0}, 52 + 2e-3),
            ({"row": 1.0, "state": 1e-3}, 52 + 5e-3),
            ({"row": 1.0, "call": 1e6}, 4 * 43 + 1e6),
            ({"row": 1.0, "state": 1e6}, 4 * 43),
            ({"row": 1.0, "can_fork": False}, 4 * 43),
        ],
        ids=str,
    )
    def test_literally(self, rates, seconds):
        runs = replace(self.FREE_RUNS, **rates)
        plan = plan_of(self.SEQUENCES)
        assert cost(mixer_share=1.0, runs=runs).seconds(plan, "cascade") == pytest.approx(seconds)
        assert cost(mixer_share=0.75, runs=runs).run_seconds(plan) == pytest.approx(0.75 * seconds)

    def test_a_branch_is_kept_if_its_fork_pays(self):
        """Calls of attention say no to 16 branches of 8 tokens; the rows that forks save in other layers say yes."""
        pairs = [[100 + n // 2] * 8 + [n % 2] * (n // 2 + 1) for n in range(32)]

        def chosen(runs):
            options = {"strategies": ("cascade",), "call": 1.0, "mixer_share": 1.0, "runs": runs}
            return cost(**options).cheapest(lambda n: plan_of(pairs, min_shared_tokens=n))[0].min_shared_tokens

        forks = replace(self.FREE_RUNS, row=1.0)
        assert chosen(forks) == 1
        assert (
            chosen(self.FREE_RUNS) == chosen(replace(forks, state=8.0)) == chosen(replace(forks, can_fork=False)) == 16
        )

    def test_the_choice_is_the_least_of_all(self):
        """What is chosen costs what `seconds` says, and no other costs less."""
        step_cost = cost(
            row_flops=3.0, flop=1.0, call=50.0, pair=1e-2, attention_share=0.25, mixer_share=0.75, runs=RunCost()
        )

        def plan(tokens):
            return plan_of(DEEP, min_shared_tokens=tokens)

        choice, _ = step_cost.cheapest(plan)
        every = {(s, n): step_cost.seconds(plan(n), s) for s in CHOICES for n in CANDIDATES}
        assert choice.seconds == min(every.values()) == every[choice.strategy, choice.min_shared_tokens]

    def test_the_batch_has_its_runs(self):
        features = [{"input_ids": ids, "labels": ids} for ids in self.SEQUENCES]
        forks = replace(self.FREE_RUNS, row=1.0)
        expected = ((1, 40, 1, ()), (4, 3, 0, ((0, 4),)))
        whole = ((4, 43, 0, ()),)
        for options, runs in (
            ({"step_cost": cost(mixer_share=1.0, runs=forks)}, expected),
            ({"step_cost": cost(mixer_share=1.0, runs=replace(forks, can_fork=False))}, whole),
            ({"step_cost": cost(mixer_share=1.0, runs=forks), "run_cost": replace(forks, can_fork=False)}, whole),
            ({"run_cost": forks}, expected),
        ):
            assert RadixCollator(**options)(features)["radix"].layout.runs.calls == runs
        for options in ({}, {"step_cost": cost(call=1.0)}):
            assert RadixCollator(**options)(features)["radix"].layout.runs is None


class TestInACollator:
    def test_the_batch_says_what_was_chosen(self):
        batch = RadixCollator(step_cost=cost(call=1.0, strategies=("cascade",)))(FEATURES)
        assert (batch["radix"].strategy, batch["radix"].min_shared_tokens) == ("cascade", 16)
        expected = RadixCollator(min_shared_tokens=16)(FEATURES)
        assert set(batch) == set(expected)
        assert torch.equal(batch["input_ids"], expected["input_ids"])

    def test_it_excludes_a_number(self):
        with pytest.raises(ValueError, match="step_cost chooses min_shared_tokens; leave out min_shared_tokens=4"):
            RadixCollator(min_shared_tokens=4, step_cost=cost())
