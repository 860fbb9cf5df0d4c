"""The benchmark of whole groups: what it measures is what its formula says, and the trainer arm runs."""

from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
import grpo_groups as benchmark  # noqa: E402


@pytest.mark.parametrize("setting", benchmark.SETTINGS[:4] + benchmark.SETTINGS[5:], ids=str)
def test_measured_is_expected(setting):
    """Over 100 generation batches, the mean of m is off by less than 0.1, and so r by less than 3 percent."""
    scattered, whole, together = benchmark.of_the_plans(np.random.default_rng(0), setting, draws=100)
    assert scattered == pytest.approx(benchmark.formula(setting), rel=0.03)
    assert scattered < whole <= together


def test_saving_falls_as_the_spread_says():
    """A group of n rows saves n - 1 prompts if it is whole, n - m if it is spread over m micro-batches."""
    setting = benchmark.Setting(num_generations=4, prompt=30, completion=2, batch_size=4, steps=4)
    rows = benchmark.generation_batch(np.random.default_rng(0), setting)
    spread = [row for turn in range(4) for row in rows[turn::4]]  # one row of every group in each micro-batch: m = 4
    assert benchmark.ratio(rows, 4) == pytest.approx(4 * 32 / (30 + 4 * 2), rel=0.02)
    assert benchmark.ratio(spread, 4) == pytest.approx(1, rel=0.02)


def test_trainer_arms(tmp_path, capsys):
    setting = benchmark.Setting(num_generations=4, prompt=40, completion=4, batch_size=4, steps=2)
    scattered, whole, together = benchmark.of_the_trainer(np.random.default_rng(0), setting, str(tmp_path))
    assert scattered < 0.8 * whole
    assert whole == pytest.approx(together, rel=0.03)
    benchmark.print_table("GRPOTrainer", lambda setting: (scattered, whole, together), [setting])
    assert f"| {scattered:.2f} | {whole:.2f} | {together:.2f} |" in capsys.readouterr().out
