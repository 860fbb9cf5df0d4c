"""What a step computes, counted, against what the collators make of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixtrain.collators.steps import StepCollator
from radixtrain.report.counts import counted_step, ordinary_counts, plans_of, radix_counts
from radixtrain.tree.cost_model import Rates, StepCost
from radixtrain.tree.runs import RunCost

COLLATOR = StepCollator(max_tokens=60)
RATES = Rates(call=1e-6, rectangle=1e-7, pair=1e-9, element=1e-9, flop=1e-10)
COST = StepCost(rates=RATES, on_host=True, num_heads=4, num_key_value_heads=2, head_dim=8, row_flops=100.0)
HYBRID = replace(COST, rates=replace(RATES, runs=RunCost()), attention_share=0.25, mixer_share=0.75)


@pytest.fixture
def features() -> list[dict[str, Any]]:
    """Eight sequences of 24 to 28 tokens after two prompts of 20, four each."""
    rng = np.random.default_rng(0)
    found = []
    for prompt in rng.integers(0, 97, (2, 20)):
        for length in (4, 5, 6, 8):
            ids = np.concatenate([prompt, rng.integers(0, 97, length)])
            found.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < 20, -100, ids)})
    return found


@pytest.mark.parametrize("step_cost", [None, COST, HYBRID])
def test_both_arms_are_counted_as_they_are_collated(features: list[dict[str, Any]], step_cost: StepCost | None) -> None:
    collator = replace(COLLATOR, step_cost=step_cost)
    counted = counted_step(features, collator, step_cost)
    radix, ordinary = collator(features), replace(collator, dedup=False)(features)
    assert [counts.rows for counts in counted.radix] == [batch["input_ids"].numel() for batch in radix.micro_batches]
    assert list(counted.ordinary) == [ordinary_counts(batch) for batch in ordinary.micro_batches]
    assert (counted.num_tokens, counted.num_rows) == (radix.num_tokens, radix.num_computed_tokens)
    assert counted.num_unique_tokens == radix.num_unique_tokens == 2 * 20 + 2 * (4 + 5 + 6 + 8)
    assert sum(counts.predictions for counts in counted.ordinary) == ordinary.num_labels


def test_a_padded_batch(features: list[dict[str, Any]]) -> None:
    (counts,) = counted_step(features, StepCollator(), None).ordinary
    assert counts == (8 * 28, 8 * 28 * 28, 2 * (4 + 5 + 6 + 8))


def test_attention_without_a_calibration_is_pairs() -> None:
    sequences = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [1, 2, 4, 5], "labels": [-100, 2, 4, 5]},
    ]
    (counts,) = counted_step(sequences, StepCollator(), None).radix
    # unique tokens at depths 1, 2, 3 and 3, 4; the second token predicts 3 and 4, the first 2, and 4 predicts 5
    assert counts == (5, 1 + 2 + 3 + 3 + 4, 3)


@pytest.mark.parametrize("cost", [COST, HYBRID])
def test_attention_by_the_calibration_is_what_the_layer_costs_beyond_its_matrices(
    features: list[dict[str, Any]], cost: StepCost
) -> None:
    step = StepCollator(step_cost=cost)(features)
    (plan,) = plans_of(features, step)
    counts = radix_counts(step.micro_batches[0], plan, cost)
    cheapest = min(cost.seconds(plan, strategy) for strategy in cost.strategies)
    assert counts.attention == pytest.approx(cheapest - plan.num_rows * 100.0 * 1e-10)


def test_a_strategy_by_name_and_no_choice_in_the_batch(features: list[dict[str, Any]]) -> None:
    step = StepCollator()(features)
    (plan,) = plans_of(features, step)
    named = replace(COST, strategies=("expand",))
    counts = radix_counts(step.micro_batches[0], plan, named)
    assert counts.attention == pytest.approx(COST.seconds(plan, "expand") - plan.num_rows * 100.0 * 1e-10)
