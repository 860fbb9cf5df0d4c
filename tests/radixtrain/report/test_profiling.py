"""Micro-batches that are timed: of both arms, from one sequence to a whole step, as time and memory allow."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from radixtrain.collators.steps import StepCollator
from radixtrain.report.profiling import ARMS, RunSetup, cases_of, time_cases


@pytest.fixture
def setup(tiny_qwen3: Callable[..., Any]) -> RunSetup:
    models: list[Any] = []

    def build(num_layers: int, device: torch.device) -> Any:
        models.append(tiny_qwen3(num_hidden_layers=num_layers).train())
        return models[-1]

    return RunSetup(
        build=build,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        moment_bytes=lambda model: 2 * sum(p.nbytes for p in model.parameters()),
        forward=nullcontext,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_layers=2,
    )


def test_cases_are_micro_batches_of_steps_and_of_their_parts(features: list[dict[str, Any]]) -> None:
    cases = cases_of([features], StepCollator(max_tokens=1000))
    sizes = {arm: [case.counts.rows for case in cases if case.arm == arm] for arm in ARMS}
    lengths = [len(feature["input_ids"]) for feature in features]
    assert sizes["radix"] == [30 + sum(lengths[:n]) - 30 * n for n in (1, 2, 4, 8, 16)]
    assert sizes["ordinary"] == [n * max(lengths[:n]) for n in (1, 2, 4, 8, 16)]
    assert [case.counts.rows for case in cases] == sorted(case.counts.rows for case in cases)


def test_a_small_budget_gives_the_first_and_the_last_micro_batch(features: list[dict[str, Any]]) -> None:
    cases = cases_of([features[:8]], StepCollator(max_tokens=50))
    assert max(case.counts.rows for case in cases) <= 50
    assert {case.arm for case in cases} == set(ARMS)


class TestTimeCases:
    def test_every_case_in_both_arms(self, features: list[dict[str, Any]], setup: RunSetup) -> None:
        cases = cases_of([features], StepCollator(max_tokens=1000))
        timed = time_cases(setup, 1, cases)
        assert list(timed.seconds) == cases and min(timed.seconds.values()) > 0
        assert timed.num_layers == 1 and timed.optimizer_seconds > 0
        smallest, largest = ([[case for case in cases if case.arm == arm][place] for arm in ARMS] for place in (0, -1))
        assert set(timed.peaks) == {*smallest, *largest}
        assert all(timed.peaks[more] > timed.peaks[less] > 0 for less, more in zip(smallest, largest, strict=True))

    @pytest.mark.parametrize("limits", [{"max_seconds": 0.0}, {"max_bytes": 1.0}])
    def test_the_smallest_in_any_case(
        self, features: list[dict[str, Any]], setup: RunSetup, limits: dict[str, float]
    ) -> None:
        cases = cases_of([features], StepCollator(max_tokens=1000))
        timed = time_cases(setup, 1, cases, **limits)
        assert [case.counts.rows for case in timed.seconds] == [
            min(case.counts.rows for case in cases if case.arm == arm) for arm in ARMS
        ]

    def test_the_model_is_restored_if_a_case_fails(self, features: list[dict[str, Any]], setup: RunSetup) -> None:
        cases = cases_of([features], StepCollator(max_tokens=1000))
        for case in cases:
            case.batch["input_ids"] = case.batch["input_ids"] + 10_000  # outside of the vocabulary
        with pytest.raises(IndexError):
            time_cases(setup, 1, cases)
