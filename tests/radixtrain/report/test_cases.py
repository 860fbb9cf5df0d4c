"""Micro-batches that are timed: of both arms, from one sequence to a whole step."""

from typing import Any

from radixtrain.collators.steps import StepCollator
from radixtrain.report.cases import cases_of


def test_cases_are_micro_batches_of_steps_and_of_their_parts(features: list[dict[str, Any]]) -> None:
    cases = cases_of([features], StepCollator(max_tokens=1000), None)
    sizes = {arm: [case.counts.rows for case in cases if case.arm == arm] for arm in ("radix", "ordinary")}
    lengths = [len(feature["input_ids"]) for feature in features]
    assert sizes["radix"] == [30 + sum(lengths[:n]) - 30 * n for n in (1, 2, 4, 8, 16)]
    assert sizes["ordinary"] == [n * max(lengths[:n]) for n in (1, 2, 4, 8, 16)]
    assert [case.counts.rows for case in cases] == sorted(case.counts.rows for case in cases)


def test_a_small_budget_gives_the_first_and_the_last_micro_batch(features: list[dict[str, Any]]) -> None:
    cases = cases_of([features[:8]], StepCollator(max_tokens=50), None)
    assert max(case.counts.rows for case in cases) <= 50
    assert {case.arm for case in cases} == {"radix", "ordinary"}
