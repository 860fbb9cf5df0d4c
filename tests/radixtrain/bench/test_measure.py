"""What is measured of a cell, that its numbers can be true, and that arms that differ are not timed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import FULL, cases
from wrong_keys import with_wrong_keys

from radixtrain.bench.cells import Cell, GivenBatch, ModelShape, build_model
from radixtrain.bench.measure import Settings, measure
from radixtrain.bench.work import make_work, work_of
from radixtrain.errors import UserError

CASCADE = Settings(("cascade",), repeats=1)


@pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
@pytest.mark.parametrize("max_tokens", cases([None, 40], [40]))
def test_given_rows(mode: Any, max_tokens: int | None, shape: ModelShape, model: Any, ragged_features: Any) -> None:
    work = work_of(GivenBatch(shape, "8 of train.jsonl", 8, mode), ragged_features, 3, max_tokens)
    (result,) = measure(model, work, CASCADE)
    assert (result.num_tokens, result.num_unique_tokens) == (200, 77)
    assert (result.best_r is None) == (max_tokens is None) and (result.best_r or result.r) >= result.r
    assert result.measured_speedup


@pytest.mark.parametrize(
    "changes",
    cases([{}, {"tree": "nested"}, {"num_sequences": 1}, {"tree": "nested", "mode": "forward"}], [{"tree": "nested"}]),
)
def test_every_strategy_is_measured(changes: dict[str, Any], model: Any, flat: Cell) -> None:
    cell, strategies = replace(flat, **changes), ("cascade", "path", "expand")
    results = measure(model, make_work(cell), Settings(strategies, repeats=1))
    assert tuple(result.attention for result in results) == strategies
    for result in results:
        assert result.num_tokens == cell.num_sequences * 46
        assert result.ordinary_seconds and result.ordinary_seconds > 0 and result.radix_seconds > 0


@pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
def test_unique_tokens_hold_less_memory(mode: Any, model: Any, flat: Cell) -> None:
    cell = replace(flat, prompt_length=200, num_sequences=16, mode=mode)
    first, again = (measure(model, make_work(cell), CASCADE)[0] for _ in range(2))
    assert first.r > 10
    assert 3 * first.radix_peak_bytes < first.ordinary_peak_bytes == again.ordinary_peak_bytes
    hidden_states = cell.num_sequences * 206 * 32 * 4  # (T, D) once; a forward pass holds several
    assert 3 * hidden_states < first.ordinary_peak_bytes < 2**27
    assert first.radix_peak_bytes == again.radix_peak_bytes


def test_the_model_comes_back(model: Any, flat: Cell) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model, make_work(flat), Settings(repeats=1))
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
@pytest.mark.parametrize("float64_truth", cases([False, True], [False]))
def test_every_truth(dtype: torch.dtype, mode: Any, float64_truth: bool, shape: ModelShape, flat: Cell) -> None:
    model = build_model(shape, torch.device("cpu"), dtype, "sdpa")
    settings = Settings(("cascade",), repeats=1, float64_truth=float64_truth)
    (result,) = measure(model, make_work(replace(flat, mode=mode)), settings)
    assert result.error >= (1e-4 if dtype == torch.bfloat16 else 0.0), "it was not run in 16 bits"


@FULL
def test_recurrent_layers_are_checked_against_float64(shape: ModelShape, flat: Cell) -> None:
    """Between two float32 runs the gradient of a decay differs by more than the bar."""
    hybrid = replace(shape, family="qwen3_5", num_hidden_layers=4)
    model = build_model(hybrid, torch.device("cpu"), torch.float32, "sdpa")
    (result,) = measure(model, make_work(replace(flat, model=hybrid)), CASCADE)
    assert result.error > 0 and 1 < result.ideal_speedup < result.r


class TestRefusal:
    """Of arms that do not compute the same."""

    @pytest.mark.parametrize(
        ("by", "float64_truth", "named"),
        [
            (1e-3, False, r"model\.layers\.\d\.self_attn\.k_"),
            pytest.param(1e-3, True, r"model\.layers\.\d\.self_attn\.k_", marks=FULL),
            (float("nan"), False, "model"),
        ],
    )
    def test_a_wrong_backward_pass(
        self, monkeypatch: pytest.MonkeyPatch, by: float, float64_truth: bool, named: str, model: Any, flat: Cell
    ) -> None:
        with_wrong_keys(monkeypatch, by)
        with pytest.raises(UserError, match=f"cascade: float32: NOT EQUAL: {named}"):
            measure(model, make_work(flat), Settings(("cascade",), repeats=1, float64_truth=float64_truth))

    def test_several_micro_batches(
        self, monkeypatch: pytest.MonkeyPatch, shape: ModelShape, model: Any, ragged_features: Any
    ) -> None:
        with_wrong_keys(monkeypatch)
        work = work_of(GivenBatch(shape, "8 of train.jsonl", 8), ragged_features, 3, 40)
        with pytest.raises(UserError, match=r"8 of train\.jsonl, step, cascade: float32: NOT EQUAL: model\.layers"):
            measure(model, work, CASCADE)

    def test_a_wrong_forward_pass_and_the_model_comes_back(
        self, monkeypatch: pytest.MonkeyPatch, model: Any, flat: Cell
    ) -> None:
        with_wrong_keys(monkeypatch, 1e-2, forward=True)
        with pytest.raises(UserError, match=r"path: float32: NOT EQUAL: model\.layers"):
            measure(model, make_work(replace(flat, mode="forward")), Settings(("path",), repeats=1))
        assert model.config._attn_implementation == "sdpa"

    @FULL
    def test_in_16_bits(self, monkeypatch: pytest.MonkeyPatch, shape: ModelShape, flat: Cell) -> None:
        with_wrong_keys(monkeypatch, 1.0)
        with pytest.raises(UserError, match="bfloat16: NOT EQUAL"):
            measure(build_model(shape, torch.device("cpu"), torch.bfloat16, "sdpa"), make_work(flat), CASCADE)
