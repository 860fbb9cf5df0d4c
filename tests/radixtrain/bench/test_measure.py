"""What is measured of a cell, and that its numbers can be true."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import FULL, cases

from radixtrain.bench.measure import (
    Cell,
    GivenBatch,
    Measured,
    ModelShape,
    Settings,
    build_model,
    make_work,
    measure,
    work_of,
)

ROOT = Path(__file__).resolve().parents[3]
SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)
NESTED = replace(FLAT, tree="nested")
RAGGED = GivenBatch(SHAPE, "8 of train.jsonl", 8)


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return build_model(SHAPE, torch.device("cpu"), dtype, "sdpa")


def measured(cell: Cell, **settings: Any) -> list[Measured]:
    return measure(model_of(), make_work(cell), Settings(repeats=1, **settings))


@FULL
def test_measuring_needs_only_torch_transformers_and_numpy(fresh: Any) -> None:
    """On a machine with a GPU nothing else need be installed."""
    code = """
import sys
for name in ("jsonargparse", "datasets", "lightning", "rich", "matplotlib", "wandb", "flash_attn", "peft", "trl"):
    sys.modules[name] = None
import torch
from radixtrain.bench.measure import Cell, ModelShape, Settings, build_model, make_work, measure
shape = ModelShape(num_hidden_layers=1, hidden_size=16, head_dim=8, vocab_size=50)
model = build_model(shape, torch.device("cpu"), torch.float32, "sdpa")
(result,) = measure(model, make_work(Cell(shape, 8, 3, 4)), Settings(("cascade",), repeats=1))
print(result.num_tokens, result.num_unique_tokens)
"""
    returned, ran = fresh(code)
    assert returned == 0, ran.said()[-2000:]
    assert ran.printed().split() == ["44", "20"]


class TestMeasure:
    @pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
    @pytest.mark.parametrize("max_tokens", cases([None, 40], [40]))
    def test_they_are_checked_and_measured(self, mode: Any, max_tokens: int | None, ragged_features: Any) -> None:
        work = work_of(replace(RAGGED, mode=mode), ragged_features, 3, max_tokens)
        (result,) = measure(model_of(), work, Settings(("cascade",), repeats=1))
        assert (result.num_tokens, result.num_unique_tokens) == (200, 77)
        assert (result.best_r is None) == (max_tokens is None) and (result.best_r or result.r) >= result.r
        assert result.measured_speedup

    @pytest.mark.parametrize(
        "cell", cases([FLAT, NESTED, replace(FLAT, num_sequences=1), replace(NESTED, mode="forward")], [NESTED])
    )
    def test_every_strategy_is_measured(self, cell: Cell) -> None:
        strategies = ("cascade", "path", "expand")
        results = measured(cell, attention=strategies)
        assert tuple(result.attention for result in results) == strategies
        for result in results:
            assert result.num_tokens == cell.num_sequences * 46
            assert result.ordinary_seconds > 0 and result.radix_seconds > 0
            assert result.efficiency == result.measured_speedup / result.ideal_speedup
            assert result.radix_tokens_per_second == result.num_tokens / result.radix_seconds

    @pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
    def test_unique_tokens_hold_less_memory(self, mode: Any) -> None:
        cell = replace(FLAT, prompt_length=200, num_sequences=16, mode=mode)
        (result,) = measured(cell, attention=("cascade",))
        assert result.r > 10
        assert 3 * result.radix_peak_bytes < result.ordinary_peak_bytes
        hidden_states = cell.num_sequences * 206 * 32 * 4  # (T, D) once; a forward pass holds several
        assert 3 * hidden_states < result.ordinary_peak_bytes < 2**27

    @FULL
    def test_memory_is_the_same_every_time(self) -> None:
        first, second = (measured(FLAT, attention=("cascade",))[0] for _ in range(2))
        assert first.ordinary_peak_bytes == second.ordinary_peak_bytes
        assert first.radix_peak_bytes == second.radix_peak_bytes

    @FULL
    def test_a_forward_pass_holds_less_than_a_step(self) -> None:
        (step,) = measured(FLAT, attention=("path",))
        (forward,) = measured(replace(FLAT, mode="forward"), attention=("path",))
        assert forward.radix_peak_bytes < step.radix_peak_bytes
        assert forward.ordinary_peak_bytes < step.ordinary_peak_bytes

    def test_the_model_comes_back(self) -> None:
        model = model_of()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        measure(model, make_work(FLAT), Settings(repeats=1))
        assert model.config._attn_implementation == "sdpa"
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    @FULL
    def test_nothing_to_share_holds_as_much_memory(self) -> None:
        (result,) = measured(replace(FLAT, prompt_length=0, suffix_length=40), attention=("cascade",))
        assert result.r == result.ideal_speedup == 1.0
        assert result.memory_ratio == result.ordinary_peak_bytes / result.radix_peak_bytes > 0.8

    @pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
    def test_without_a_timed_ordinary_arm(self, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.bench.work.UNTIMED_TOKENS", 3 * 46)
        work = make_work(replace(FLAT, mode=mode), is_ordinary_timed=False)
        assert [len(batch.members) for batch in work.ordinary] == [3, 3, 2]
        (result,) = measure(model_of(), work, Settings(("cascade",), repeats=2, ordinary=False))
        nothing = (result.ordinary_seconds, result.measured_speedup, result.efficiency, result.memory_ratio)
        assert nothing == (None, None, None, None) and result.highest_speedup is None
        assert result.microseconds_per_unique_token == 1e6 * result.radix_seconds / (40 + 8 * 6)
        assert result.lowest_radix_seconds <= result.radix_seconds <= result.highest_radix_seconds
        assert result.error > 0 and result.radix_peak_bytes > 0
