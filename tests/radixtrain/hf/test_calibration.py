"""Rates that are measured: fitted to the clock, without touching the random state of the run."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from radixtrain import calibrate
from radixtrain.hf import calibration
from radixtrain.hf.calibration import non_negative_fit
from radixtrain.hf.step_cost import step_cost_of
from radixtrain.tree.cost_model import CHOICES, Rates

FLOPS = 6.0 * 512 * 32 * 128


@pytest.fixture
def clock(monkeypatch):
    """`clock(cost)`: a clock that obeys the formula; without a cost each run takes a second."""

    def install(cost=None):
        plans = calibration._batches() if cost else ()
        seconds = iter([FLOPS * 1e-12] + [cost.seconds(plan, strategy) for plan in plans for strategy in CHOICES])

        def timed(runs, device, repeats, num_warmups):
            ((name, run),) = runs.items()
            run()
            return {name: [next(seconds) if cost else 1.0]}

        monkeypatch.setattr(calibration, "seconds_in_turns", timed)

    return install


def test_the_rates_are_those_of_the_clock(tiny_qwen3, clock):
    """With a clock that obeys the formula, the rates of the formula come out, and nothing else of the cost changes."""
    fixed = step_cost_of(tiny_qwen3())
    rates = Rates(call=3e-5, rectangle=1e-6, pair=2e-10, element=1e-9, flop=0.0)
    clock(replace(fixed, rates=rates))
    cost = calibrate(tiny_qwen3())
    found, expected = ({**asdict(each), "runs": 0.0} for each in (cost.rates, rates))
    assert found == pytest.approx({**expected, "flop": 1e-12}, rel=1e-6)
    assert replace(cost, rates=fixed.rates) == fixed


def test_recurrent_layers_cost_as_much_more_as_a_matrix_product(tiny_hybrid, clock):
    model = tiny_hybrid("LFM2")
    clock()
    fixed, cost = step_cost_of(model), calibrate(model)
    assert cost.run_cost.row / fixed.run_cost.row == pytest.approx(cost.rates.flop / fixed.rates.flop)
    assert cost.run_cost.call / cost.run_cost.row == pytest.approx(64)


def test_the_fit_is_exact_if_it_can_be_and_never_negative():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 100, (12, 4))
    rates = np.array([1e-5, 0.0, 3e-9, 2e-7])
    assert np.allclose(non_negative_fit(work, work @ rates), rates, rtol=1e-9, atol=1e-15)
    assert min(non_negative_fit(work, work @ np.array([1e-5, -1e-6, 3e-9, 2e-7]))) >= 0


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_nothing_of_the_run_changes(tiny_qwen3, clock, context):
    """Neither random state nor gradients, in any mode of torch."""
    clock()
    model = tiny_qwen3()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with context():
        assert calibrate(model, dtype=torch.bfloat16).rates.flop > 0
    assert torch.equal(torch.rand(1), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_by_the_clock_of_this_machine(tiny_qwen3):
    rates = calibrate(tiny_qwen3(), attention="path").rates
    assert rates.flop > 0 and max(rates.call, rates.rectangle, rates.pair, rates.element) > 0
