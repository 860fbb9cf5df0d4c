"""Arms that differ are not timed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import FULL, cases
from torch import Tensor

import radixtrain.hf.attention
from radixtrain.bench.cells import Cell, GivenBatch, ModelShape, build_model
from radixtrain.bench.measure import Measured, Settings, measure
from radixtrain.bench.work import make_work, work_of
from radixtrain.errors import UserError

SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)
NESTED = replace(FLAT, tree="nested")
RAGGED = GivenBatch(SHAPE, "8 of train.jsonl", 8)


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return build_model(SHAPE, torch.device("cpu"), dtype, "sdpa")


def measured(cell: Cell, **settings: Any) -> list[Measured]:
    return measure(model_of(), make_work(cell), Settings(repeats=1, **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", cases([FLAT, replace(NESTED, mode="forward")], [FLAT]))
@pytest.mark.parametrize("float64_truth", cases([False, True], [False]))
def test_every_truth(dtype: torch.dtype, cell: Cell, float64_truth: bool) -> None:
    settings = Settings(("cascade",), repeats=1, float64_truth=float64_truth)
    (result,) = measure(model_of(dtype=dtype), make_work(cell), settings)
    assert result.error >= (1e-4 if dtype == torch.bfloat16 else 0.0), "it was not run in 16 bits"


@FULL
def test_recurrent_layers_are_checked_against_float64() -> None:
    """Between two float32 runs the gradient of a decay differs by more than the bar."""
    shape = replace(SHAPE, family="qwen3_5", num_hidden_layers=4)
    model = build_model(shape, torch.device("cpu"), torch.float32, "sdpa")
    (result,) = measure(model, make_work(replace(FLAT, model=shape)), Settings(("cascade",), repeats=1))
    assert result.error > 0 and 1 < result.ideal_speedup < result.r


@pytest.fixture
def scaled_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """`scaled_attention(by, backward)`: keys, or only the gradients of the keys, off by this factor."""
    attend = radixtrain.hf.attention.tree_attention

    def install(by: float, backward: bool) -> None:
        def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            wrong = key + by * (key - key.detach()) if backward else key * (1 + by)
            return attend(query, wrong, value, *args, **options)

        monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", broken)

    return install


class TestRefusal:
    @pytest.mark.parametrize("float64_truth", cases([False, True], [False]))
    def test_a_wrong_backward_pass_is_not_timed(self, scaled_attention: Any, float64_truth: bool) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"cascade: float32: NOT EQUAL: model\.layers\.\d\.self_attn\.k_"):
            measured(FLAT, attention=("cascade",), float64_truth=float64_truth)

    def test_the_radix_arm_is_checked_without_a_timed_ordinary_arm(self, scaled_attention: Any) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"cascade: float32: NOT EQUAL: model\.layers\.\d\.self_attn\.k_"):
            measure(model_of(), make_work(FLAT, False), Settings(("cascade",), repeats=1, ordinary=False))

    def test_several_micro_batches_are_checked_too(self, scaled_attention: Any, ragged_features: Any) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"8 of train\.jsonl, step, cascade: float32: NOT EQUAL: model\.layers"):
            measure(model_of(), work_of(RAGGED, ragged_features, 3, 40), Settings(("cascade",), repeats=1))

    def test_a_wrong_forward_pass_is_not_timed(self, scaled_attention: Any) -> None:
        scaled_attention(1e-2, False)
        with pytest.raises(UserError, match="NOT EQUAL: last_hidden_state"):
            measured(replace(FLAT, mode="forward"), attention=("path",))

    @FULL
    def test_in_16_bits(self, scaled_attention: Any) -> None:
        scaled_attention(1.0, True)
        with pytest.raises(UserError, match="bfloat16: NOT EQUAL"):
            measure(model_of(dtype=torch.bfloat16), make_work(FLAT), Settings(("cascade",), repeats=1))

    def test_the_model_comes_back(self, scaled_attention: Any) -> None:
        scaled_attention(1e-2, False)
        model = model_of()
        with pytest.raises(UserError):
            measure(model, make_work(FLAT), Settings(repeats=1))
        assert model.config._attn_implementation == "sdpa"

    def test_a_gradient_that_is_not_a_number(self, scaled_attention: Any) -> None:
        scaled_attention(float("nan"), True)
        with pytest.raises(UserError, match="NOT EQUAL"):
            measured(FLAT, attention=("cascade",))
