"""Rates that are measured: fitted to the clock, without touching the random state of the run."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from radixtrain.hf import rates as rates_module
from radixtrain.hf.rates import Layer
from radixtrain.hf.shape import ModelDimensions
from radixtrain.tree.cost_model import CHOICES, Rates


def layer_of(config):
    return Layer(model=ModelDimensions.of(config), device=torch.device("cpu"), dtype=torch.float32, kernel="torch")


def test_the_rates_are_those_of_the_clock(tiny_qwen3, monkeypatch):
    """With a clock that obeys the formula, the rates of the formula come out."""
    layer = layer_of(tiny_qwen3().config)
    truth = layer.cost(Rates(call=3e-5, rectangle=1e-6, pair=2e-10, element=1e-9, flop=0.0))
    seconds = iter([truth.seconds(plan, strategy) for plan in rates_module._batches() for strategy in CHOICES])
    monkeypatch.setattr(rates_module, "fastest", lambda run, device: next(seconds, 6.0 * 512 * 32 * 64))
    rates, error = rates_module.measured_rates(layer)
    found, expected = ({**asdict(each), "runs": 0.0} for each in (rates, truth.rates))
    assert found == pytest.approx({**expected, "flop": 1.0}, rel=1e-6)
    assert error < 1e-6


def test_the_fit_is_exact_if_it_can_be_and_never_negative():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 100, (12, 4))
    rates = np.array([1e-5, 0.0, 3e-9, 2e-7])
    assert np.allclose(rates_module.non_negative_fit(work, work @ rates), rates, rtol=1e-9, atol=1e-15)
    assert min(rates_module.non_negative_fit(work, work @ np.array([1e-5, -1e-6, 3e-9, 2e-7]))) >= 0


def test_random_state_does_not_change(tiny_qwen3, monkeypatch):
    layer = layer_of(tiny_qwen3().config)
    monkeypatch.setattr(rates_module, "fastest", lambda run, device: run() or 1.0)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    rates, error = rates_module.measured_rates(layer)
    assert torch.equal(torch.rand(1), expected)
    assert rates.runs is None and rates.flop > 0 and error >= 0


def test_the_fastest_run_counts_but_not_the_first(monkeypatch):
    """What a run takes by a clock that only the run moves."""
    now, durations = [0.0], iter([0.5, 3.0, 2.0, 4.0])
    monkeypatch.setattr(rates_module.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += next(durations)

    assert rates_module.fastest(run, torch.device("cpu"), repeats=3) == 2.0
