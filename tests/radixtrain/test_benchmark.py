"""What a cell of the benchmark holds, what it refuses to measure, and that its numbers can be true."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import radixtrain.layer_attention
from radixtrain.benchmark import Cell, Measured, ModelShape, Settings, build_model, make_work, mean_loss, measure
from radixtrain.cost import ideal_speedup
from radixtrain.errors import UserError

SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)
NESTED = replace(FLAT, tree="nested")
CPU = torch.device("cpu")


def model_of(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> Any:
    return build_model(shape, CPU, dtype, "sdpa")


def measured(cell: Cell, **settings: Any) -> list[Measured]:
    return measure(model_of(cell.model), make_work(cell), Settings(repeats=1, **settings))


class TestWork:
    def test_a_flat_tree_shares_the_prompt(self) -> None:
        plan = make_work(FLAT).plan
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (8 * 46, 40 + 8 * 6, 2)

    def test_a_nested_tree_has_three_levels(self) -> None:
        plan = make_work(NESTED).plan
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (8 * 46, 20 + 2 * 20 + 8 * 6, 3)
        assert make_work(replace(NESTED, num_sequences=9)).plan.num_unique_tokens == 20 + 3 * 20 + 9 * 6

    @pytest.mark.parametrize("cell", [replace(FLAT, num_sequences=1), replace(FLAT, prompt_length=0)])
    def test_nothing_to_share(self, cell: Cell) -> None:
        work = make_work(cell)
        assert work.plan.compression_ratio == work.ideal_speedup == 1.0

    @pytest.mark.parametrize("cell", [FLAT, NESTED])
    def test_the_loss_is_on_the_suffixes(self, cell: Cell) -> None:
        work = make_work(cell)
        assert work.num_labels == int(work.radix["radix_loss_weights"].sum()) == 8 * 6
        assert all((feature["labels"] != -100).sum() == 6 for feature in work.features)

    def test_the_ordinary_batch_has_no_padding(self) -> None:
        assert make_work(NESTED).ordinary["attention_mask"].all()

    def test_a_cell_is_the_same_every_time(self) -> None:
        first, second = make_work(NESTED), make_work(NESTED)
        assert all(
            np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(first.features, second.features, strict=True)
        )

    def test_ideal_is_that_of_cost(self) -> None:
        work = make_work(FLAT)
        # a suffix of 6 has 5 predictors of its own and shares the last token of the prompt with all others
        assert work.ideal_speedup == ideal_speedup(SHAPE.config(), work.plan, 8 * 6, 1 + 8 * 5)

    def test_a_step_is_three_forward_passes(self) -> None:
        forward = make_work(replace(FLAT, mode="forward"))
        assert make_work(FLAT).ordinary_teraflops == pytest.approx(3 * forward.ordinary_teraflops)


class TestShape:
    def test_what_is_left_out_follows_from_the_width(self) -> None:
        config = ModelShape(hidden_size=256).config()
        sizes = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert sizes == (768, 4, 2, 64)

    def test_name(self) -> None:
        assert str(ModelShape(2, 128)) == "2x128"
        assert str(ModelShape(name="Qwen3-0.6B")) == "Qwen3-0.6B"

    def test_the_weights_are_the_same_every_time(self) -> None:
        first, second = (model_of().state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


class TestMeasure:
    @pytest.mark.parametrize("cell", [FLAT, NESTED, replace(FLAT, num_sequences=1), replace(NESTED, mode="forward")])
    def test_every_strategy_is_measured(self, cell: Cell) -> None:
        strategies = ("cascade", "path", "expand")
        results = measured(cell, attention=strategies)
        assert tuple(result.attention for result in results) == strategies
        for result in results:
            assert result.num_tokens == cell.num_sequences * 46
            assert result.ordinary_seconds > 0 and result.radix_seconds > 0
            assert result.efficiency == result.measured_speedup / result.ideal_speedup
            assert result.radix_tokens_per_second == result.num_tokens / result.radix_seconds
            assert result.error < 1e-5

    @pytest.mark.parametrize("mode", ["step", "forward"])
    def test_unique_tokens_hold_less_memory(self, mode: Any) -> None:
        cell = replace(FLAT, prompt_length=200, num_sequences=16, mode=mode)
        (result,) = measured(cell, attention=("cascade",))
        assert result.r > 10
        assert 3 * result.radix_peak_bytes < result.ordinary_peak_bytes
        hidden_states = cell.num_sequences * 206 * 32 * 4  # (T, D) once; a forward pass holds several
        assert 3 * hidden_states < result.ordinary_peak_bytes < 2**27

    def test_memory_is_the_same_every_time(self) -> None:
        first, second = (measured(FLAT, attention=("cascade",))[0] for _ in range(2))
        assert first.ordinary_peak_bytes == second.ordinary_peak_bytes
        assert first.radix_peak_bytes == second.radix_peak_bytes

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

    def test_both_arms_have_the_loss_of_hugging_face(self) -> None:
        model, work = model_of(), make_work(NESTED)
        labels = torch.tensor(np.stack([feature["labels"] for feature in work.features]))
        truth = model(input_ids=work.ordinary["input_ids"], labels=labels).loss
        assert mean_loss(model, work, None).item() == pytest.approx(truth.item(), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("cell", [FLAT, replace(NESTED, mode="forward")])
    @pytest.mark.parametrize("float64_truth", [False, True])
    def test_every_truth(self, dtype: torch.dtype, cell: Cell, float64_truth: bool) -> None:
        settings = Settings(("cascade",), repeats=1, float64_truth=float64_truth)
        (result,) = measure(model_of(dtype=dtype), make_work(cell), settings)
        low, high = (1e-4, 0.2) if dtype == torch.bfloat16 else (0.0, 1e-5)
        assert low <= result.error < high


@pytest.fixture
def scaled_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """`scaled_attention(by, backward)`: keys, or the gradients of the keys alone, off by this factor."""
    attend = radixtrain.layer_attention.tree_attention

    def install(by: float, backward: bool) -> None:
        def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            wrong = key + by * (key - key.detach()) if backward else key * (1 + by)
            return attend(query, wrong, value, *args, **options)

        monkeypatch.setattr(radixtrain.layer_attention, "tree_attention", broken)

    return install


class TestRefusal:
    @pytest.mark.parametrize("float64_truth", [False, True])
    def test_a_wrong_backward_pass_is_not_timed(self, scaled_attention: Any, float64_truth: bool) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"cascade: float32: NOT EQUAL: model\.layers\.\d\.self_attn\.k_"):
            measured(FLAT, attention=("cascade",), float64_truth=float64_truth)

    def test_a_wrong_forward_pass_is_not_timed(self, scaled_attention: Any) -> None:
        scaled_attention(1e-2, False)
        with pytest.raises(UserError, match="NOT EQUAL: last_hidden_state"):
            measured(replace(FLAT, mode="forward"), attention=("path",))

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
