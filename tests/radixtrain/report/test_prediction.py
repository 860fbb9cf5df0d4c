"""Predictions from timings that are given, so that they can be told exactly; and a short run of real ones."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixtrain import share_prefixes
from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.hf.activation_checkpointing import recompute
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.report import prediction as module
from radixtrain.report.prediction import Prediction, Process, free_bytes, predict_seconds
from radixtrain.report.profiling import Case, RunSetup, Timings, cases_of
from radixtrain.report.sharing import CountedStep, Counts, Draw, SampledSteps
from radixtrain.timing import peak_bytes

CPU = torch.device("cpu")
BARE = Process(0, 1.0)
SIZES = [Counts(100, 10, 5), Counts(200, 40, 9), Counts(400, 90, 40), Counts(800, 500, 60), Counts(900, 100, 7)]
CASES = [Case(arm, counts, {}, 1) for counts in SIZES for arm in ("radix", "ordinary")]
BASE, LAYER = {"radix": (1e-5, 0.0, 2e-4, 1e-3), "ordinary": (3e-5, 0.0, 2e-4, 0.0)}, (1e-4, 1e-5, 0.0, 2e-4)


def seconds_of(case: Case, num_layers: int) -> float:
    """A law of the kind that is fitted."""
    terms = np.array([*case.counts, 1.0])
    return float(terms @ np.array(BASE[case.arm]) + num_layers * terms @ np.array(LAYER))


def held_of(case: Case, num_layers: int) -> int:
    """Bytes after the forward pass: 9 for each row and layer."""
    return int(case.counts.rows) * (40 + 9 * num_layers)


def peak_of(case: Case, num_layers: int) -> int:
    """Bytes: 10 for each row more than these, or 60 for the gradient of embeddings."""
    rows = int(case.counts.rows)
    return max(60 * rows, held_of(case, num_layers) + 10 * rows)


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


@pytest.fixture
def by_law(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Timings by the law; the list receives the depths that were timed."""
    depths: list[int] = []

    def time_cases(setup: RunSetup, num_layers: int, cases: Sequence[Case], *limits: float) -> Timings:
        depths.append(num_layers)
        return Timings(
            num_layers=num_layers,
            seconds={case: seconds_of(case, num_layers) for case in cases},
            peaks={case: peak_of(case, num_layers) for case in cases},
            held={case: held_of(case, num_layers) for case in cases},
            optimizer_seconds=0.01 + 0.002 * num_layers,
            cpu_share=1.0,
        )

    monkeypatch.setattr(module, "time_cases", time_cases)
    return depths


def step_of(radix: Counts, ordinary: Counts, collate_seconds: float = 0.0) -> CountedStep:
    """A whole chat has a tenth of the rows of its turns."""
    return CountedStep(
        num_tokens=1000,
        num_whole_tokens=100,
        whole=(Counts(ordinary.rows / 10, 0, 0),),
        num_unique_tokens=100,
        num_rows=radix.rows,
        radix=(radix,),
        ordinary=(ordinary,),
        collate_seconds=collate_seconds,
    )


class TestByLaw:
    @pytest.mark.parametrize(("num_layers", "depths"), [(28, [3, 1]), (3, [3]), (1, [1])])
    def test_a_law_of_this_kind_is_found(self, by_law: list[int], num_layers: int, depths: list[int]) -> None:
        setup = setup_of(linear, num_layers)
        found = predict_seconds(setup, CASES, num_workers=1, max_seconds=50, process=BARE)
        assert by_law == depths and found.timed_layers == tuple(sorted(depths))
        other = Counts(3000, 700, 300)
        step = step_of(other, other)
        overhead = 0.01 + 0.002 * num_layers + module.STEP_SECONDS
        for arm, seconds in (("radix", found.radix_seconds(step)), ("ordinary", found.ordinary_seconds(step.ordinary))):
            assert seconds == pytest.approx(seconds_of(Case(arm, other, {}, 1), num_layers) + overhead)

    def test_layers_of_several_kinds_are_timed_together(self, by_law: list[int]) -> None:
        predict_seconds(setup_of(linear, 34, period=6), CASES, num_workers=1, max_seconds=50, process=BARE)
        assert by_law == [18, 6]

    def test_memory_is_state_and_the_largest_micro_batch(self, by_law: list[int]) -> None:
        """And the process; in the model of one layer, the peak is the gradient of the embeddings."""
        found = predict_seconds(
            setup_of(linear, 28), CASES, num_workers=1, max_seconds=50, process=Process(12_345, 1.5)
        )
        step = replace(step_of(SIZES[0], SIZES[0]), radix=(SIZES[0], Counts(2000, 0, 0)))
        state = 28 * 100 * 4 * (1 + 1 + 2) + 12_345
        sampled = SampledSteps(draw=Draw(8, 100), steps=(step,), scale=1.0)
        assert found.memory_bytes(sampled) == pytest.approx(state + 1.5 * 2000 * (50 + 9 * 28), rel=1e-6)

    def test_a_model_that_memory_does_not_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "free_bytes", lambda device: 2.0 * 3 * 1600 - 1)
        with pytest.raises(
            UserError, match=r"^3 of its 28 layers with gradients and optimizer need 0\.0 GiB, and 0\.0"
        ):
            predict_seconds(setup_of(linear, 28), CASES, num_workers=1, max_seconds=50, process=BARE)

    def test_few_cases_are_fitted_by_few_rates(self, by_law: list[int]) -> None:
        few = [CASES[0], CASES[1]]
        found = predict_seconds(setup_of(linear, 2), few, num_workers=1, max_seconds=50, process=BARE)
        assert found.radix[0] > 0 and not found.radix[1:].any()


@pytest.mark.parametrize(("share", "period"), [(0.0, 1), (0.5, 2), (1.0, 1)])
def test_bytes_are_those_that_are_counted(
    tiny_qwen3: Callable[..., Any], features: list[dict[str, Any]], share: float, period: int
) -> None:
    """Of a model of 10 layers, by models of 1 and 3 periods: torch's allocations, which are the same everywhere."""

    def build(num_layers: int, device: torch.device) -> Any:
        with device:
            model = tiny_qwen3(num_hidden_layers=num_layers).train()
        recompute(model, share)
        return model

    cases = cases_of([features], StepCollator(max_tokens=1000))
    setup = setup_of(build, 10, period=period)
    found = predict_seconds(
        setup, cases, num_workers=1, max_seconds=1e6, process=BARE
    )  # a busy machine leaves out no case
    largest = [case for case in cases if case.arm == "radix"][-1]
    step = SampledSteps(draw=Draw(8, 100), steps=(step_of(largest.counts, largest.counts),), scale=1.0)
    model = share_prefixes(build(10, CPU))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run = lambda: forward_rows(model, largest.batch, True).loss_sum().backward()  # noqa: E731
    run()
    assert found.memory_bytes(step) - found.state_bytes == pytest.approx(peak_bytes(run, CPU), rel=0.05)


class TestPrediction:
    RATES = np.array([1.0, 0.0, 0.0, 0.0])
    FOUND = Prediction(
        radix=RATES,
        ordinary=RATES,
        peak=RATES,
        optimizer_seconds=10.0,
        state_bytes=3,
        process=Process(2, 1.0),
        waits_for_collator=False,
        timed_layers=(1, 3),
        cpu_share=1.0,
    )

    def test_speedup_and_epoch(self) -> None:
        steps = (step_of(Counts(100, 0, 0), Counts(400, 0, 0)), step_of(Counts(300, 0, 0), Counts(600, 0, 0)))
        sampled = SampledSteps(draw=Draw(8, 100), steps=steps, scale=4.0)
        fixed = 2 * (10 + module.STEP_SECONDS)
        expected = [(rows + fixed) / (400 + fixed) for rows in (1000, 100)]
        assert list(self.FOUND.speedups(sampled)) == pytest.approx(expected)
        assert self.FOUND.seconds_per_epoch(sampled) == pytest.approx(4 * (400 + fixed))
        assert self.FOUND.memory_bytes(sampled) == 5 + 300

    def test_a_collator_that_takes_cores_from_the_step(self) -> None:
        step = step_of(Counts(100, 0, 0), Counts(100, 0, 0), collate_seconds=7.0)
        without = self.FOUND.radix_seconds(step)
        assert replace(self.FOUND, waits_for_collator=True).radix_seconds(step) == without + 7.0


def test_free_bytes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 in all: another process has 30, this one 20, and 5 more that its allocator keeps."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (25, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 25)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 20)
    assert free_bytes(torch.device("cuda", 0)) == 30
