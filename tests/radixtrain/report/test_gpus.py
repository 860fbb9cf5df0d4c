"""Arithmetic for devices that are not here."""

from typing import Any

import numpy as np
import pytest

from radixtrain.bench.cells import Cell, ModelShape, features_of_cell
from radixtrain.bench.work import make_work
from radixtrain.collators.steps import StepCollator
from radixtrain.report.counts import counted_step
from radixtrain.report.gpus import GPUS, gpu_estimates
from radixtrain.report.sharing import Draw, SampledSteps

CELL = Cell(ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97), 40, 6, 8)


def sampled(scale: float = 1.0) -> SampledSteps:
    step = counted_step(features_of_cell(CELL), StepCollator(), None)
    return SampledSteps(draw=Draw(8, 1000), steps=(step,), scale=scale)


def test_the_speedup_is_the_ideal_of_bench() -> None:
    config: Any = CELL.model.config()
    for estimate in gpu_estimates(config, sampled()):
        assert estimate.ideal_speedup == pytest.approx(make_work(CELL).ideal_speedup(config))


def test_seconds_are_operations_over_the_peak() -> None:
    config: Any = CELL.model.config()
    teraflops = make_work(CELL).ordinary_teraflops(config)
    estimates = gpu_estimates(config, sampled(scale=10.0))
    for estimate in estimates:
        assert estimate.ordinary_seconds_per_epoch == pytest.approx(10 * teraflops / estimate.teraflops)
        ratio = estimate.ordinary_seconds_per_epoch / estimate.seconds_per_epoch
        assert ratio == pytest.approx(estimate.ideal_speedup)
    assert (np.diff([estimate.teraflops for estimate in estimates]) <= 0).all()


def test_the_table_names_each_device_once() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert all(50 < gpu.teraflops < 3000 and 16 <= gpu.gigabytes < 300 for gpu in GPUS)
