"""Predictions from timings that are given, so that they can be told exactly; and a short run of real ones."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from radixtrain import share_prefixes
from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.explain import speed
from radixtrain.explain.sharing import Draw, SampledSteps
from radixtrain.explain.speed import ARMS, Case, RunSetup, StepPrediction, Timings, cases_of, predict_steps, time_cases
from radixtrain.hf.activation_checkpointing import recompute
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.timing import peak_bytes

CPU = torch.device("cpu")
SIZES = (100, 200, 400, 800)
CASES = [Case(arm, {"input_ids": torch.zeros(1, rows)}, 1) for rows in SIZES for arm in ARMS]
RADIX = StepCollator(max_tokens=1000)
Features = list[dict[str, Any]]


def setup_of(build: Callable[[int, torch.device], Any], num_layers: int = 2, **changes: Any) -> RunSetup:
    return RunSetup(
        build=build,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        moment_bytes=lambda model: 2 * sum(p.nbytes for p in model.parameters()),
        forward=nullcontext,
        device=CPU,
        dtype=torch.float32,
        num_layers=num_layers,
        **changes,
    )


def linear(num_layers: int, device: torch.device) -> torch.nn.Module:
    """A model of 100 parameters for each layer."""
    return torch.nn.ModuleList(torch.nn.Linear(10, 10, bias=False, device=device) for _ in range(num_layers))


def cases(features: Features, collator: StepCollator = RADIX) -> list[Case]:
    return [case for arm in ARMS for case in cases_of(arm, [features], replace(collator, dedup=arm == "radix"))]


def sampled(*radix: int, ordinary: tuple[int, ...] = (1000,), **rest: Any) -> SampledSteps:
    counts = {"num_tokens": 1000, "num_whole_tokens": 1000, "num_unique_tokens": 100}
    return SampledSteps(draw=Draw(8, 100), num_steps=1, scale=1.0, radix=radix, ordinary=ordinary, **counts | rest)


def seconds_of(case: Case, num_layers: int) -> float:
    return case.rows * (0.01 if case.arm == "radix" else 0.03) + num_layers * (case.rows * 1e-3 + 0.1)


def held_of(case: Case, num_layers: int) -> int:
    return case.rows * (40 + 9 * num_layers)


@pytest.fixture
def by_law(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Timings by the law; the list receives the depths that were timed. A small model's peak is a gradient's."""
    depths: list[int] = []

    def time_cases(setup: RunSetup, num_layers: int, cases: Sequence[Case], *limits: float) -> Timings:
        depths.append(num_layers)
        return Timings(
            seconds={case: seconds_of(case, num_layers) for case in cases},
            peaks={case: max(60 * case.rows, held_of(case, num_layers) + 10 * case.rows) for case in cases},
            held={case: held_of(case, num_layers) for case in cases if case.arm == "radix"},
            optimizer_seconds=0.01 + 0.002 * num_layers,
            cpu_share=1.0,
        )

    monkeypatch.setattr(speed, "time_cases", time_cases)
    return depths


@pytest.mark.parametrize(
    ("num_layers", "period", "depths"), [(28, 1, [3, 1]), (3, 1, [3]), (1, 1, [1]), (34, 6, [18, 6])]
)
def test_further_layers_take_as_much_as_those_between(
    by_law: list[int], num_layers: int, period: int, depths: list[int]
) -> None:
    """At the rows that were timed, between them, and beyond; memory is state and the largest micro-batch."""
    found = predict_steps(setup_of(linear, num_layers, period=period), CASES, 1, 50)
    assert by_law == depths and found.timed_layers == tuple(sorted(depths))
    overhead = 0.01 + 0.002 * num_layers + speed.STEP_SECONDS
    for arm in ARMS:
        at = {case.rows: seconds_of(case, num_layers) for case in CASES if case.arm == arm}
        for rows, seconds in ((400, at[400]), (300, (at[200] + at[400]) / 2), (1600, 2 * at[800]), (50, at[100] / 2)):
            step = sampled(rows, ordinary=(rows,))
            assert found.seconds(step, arm) == pytest.approx(seconds + overhead), (arm, rows)
    state = num_layers * 100 * 4 * (1 + 1 + 2)
    if depths[0] > 1:
        activations = 1600 * (50 + 9 * num_layers)
        assert found.memory_bytes(sampled(100, 1600)) == pytest.approx(state + activations, rel=1e-6)


def test_a_model_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "free_bytes", lambda device: 2.0 * 3 * 1600 - 1)
    with pytest.raises(UserError, match=r"^3 of its 28 layers with gradients and optimizer need 0\.0 GiB, and 0\.0"):
        predict_steps(setup_of(linear, 28), CASES, 1, 50)


def test_a_collator_that_takes_cores_from_the_step() -> None:
    points = [(100, 10.0)]
    found = StepPrediction(points, points, points, 10.0, 3, False, (1, 3), 1.0)
    step = sampled(100, 300, collate_seconds=7.0)
    assert found.seconds(step) == pytest.approx(50 + speed.STEP_SECONDS) and found.memory_bytes(step) == 3 + 30
    waiting = found._replace(waits_for_collator=True)
    assert waiting.seconds(step) == found.seconds(step) + 7 and waiting.seconds(step, "ordinary") < 111


@pytest.mark.parametrize(("share", "period"), [(0.0, 1), (0.5, 2), (1.0, 1)])
def test_bytes_are_those_that_are_counted(
    tiny_qwen3: Callable[..., Any], features: Features, share: float, period: int
) -> None:
    """Of a model of 10 layers, by models of 1 and 3 periods: torch's allocations, which are the same everywhere."""

    def build(num_layers: int, device: torch.device) -> Any:
        with device:
            model = tiny_qwen3(num_hidden_layers=num_layers).train()
        recompute(model, share)
        return model

    all_cases = cases(features)
    found = predict_steps(setup_of(build, 10, period=period), all_cases, 1, 1e6)  # a busy machine leaves out none
    largest = [case for case in all_cases if case.arm == "radix"][-1]
    model = share_prefixes(build(10, CPU))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run = lambda: forward_rows(model, largest.batch, True).loss_sum().backward()  # noqa: E731
    run()
    activations = found.memory_bytes(sampled(largest.rows)) - found.state_bytes
    assert activations == pytest.approx(peak_bytes(run, CPU), rel=0.05)


def test_free_bytes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 in all: another process has 30, this one 20, and 5 more that its allocator keeps."""
    for name, value in (("mem_get_info", (25, 80)), ("memory_reserved", 25), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    assert speed.free_bytes(torch.device("cuda", 0)) == 30


def test_cases_are_micro_batches_of_steps_and_of_their_parts(features: Features) -> None:
    sizes = {arm: [case.rows for case in cases(features) if case.arm == arm] for arm in ARMS}
    lengths = [len(feature["input_ids"]) for feature in features]
    assert sizes["radix"] == [30 + sum(lengths[:n]) - 30 * n for n in (1, 2, 4, 8, 16)]
    assert sizes["ordinary"] == [n * max(lengths[:n]) for n in (1, 2, 4, 8, 16)]
    assert max(case.rows for case in cases(features[:8], StepCollator(max_tokens=50))) <= 50


class TestTimeCases:
    @pytest.fixture
    def setup(self, tiny_qwen3: Callable[..., Any]) -> RunSetup:
        return setup_of(lambda num_layers, device: tiny_qwen3(num_hidden_layers=num_layers).train())

    def test_every_case_in_both_arms(self, features: Features, setup: RunSetup) -> None:
        all_cases = cases(features)
        timed = time_cases(setup, 1, all_cases)
        assert list(timed.seconds) == all_cases and min(timed.seconds.values()) > 0 and timed.optimizer_seconds > 0
        radix, ordinary = ([case for case in all_cases if case.arm == arm] for arm in ARMS)
        assert {*timed.peaks} == {radix[0], radix[-1], ordinary[0]} and {*timed.held} == {radix[0], radix[-1]}
        assert timed.peaks[radix[-1]] > timed.peaks[radix[0]] > timed.held[radix[0]] > 0

    @pytest.mark.parametrize("limits", [{"max_seconds": 0.0}, {"max_bytes": 1.0}])
    def test_the_smallest_in_any_case(self, features: Features, setup: RunSetup, limits: dict[str, float]) -> None:
        all_cases = cases(features)
        smallest = [min(case.rows for case in all_cases if case.arm == arm) for arm in ARMS]
        assert [case.rows for case in time_cases(setup, 1, all_cases, **limits).seconds] == smallest

    def test_the_model_is_restored_if_a_case_fails(self, features: Features, setup: RunSetup) -> None:
        for case in (all_cases := cases(features)):
            case.batch["input_ids"] = case.batch["input_ids"] + 10_000  # outside of the vocabulary
        with pytest.raises(IndexError):
            time_cases(setup, 1, all_cases)
