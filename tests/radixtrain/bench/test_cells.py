"""Shapes and cells: their defaults, their names, the same weights and tokens every time."""

from dataclasses import replace

import pytest
import torch

from radixtrain.bench.cells import Cell, ModelShape, build_model
from radixtrain.errors import UserError

SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)


class TestShape:
    def test_what_is_left_out_follows_from_the_width(self) -> None:
        config = ModelShape(hidden_size=256).config()
        sizes = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert sizes == (768, 4, 2, 64)

    def test_name(self) -> None:
        assert str(ModelShape(2, 128)) == "2x128"
        assert str(ModelShape(name="Qwen3-0.6B")) == "Qwen3-0.6B"

    def test_a_hybrid(self) -> None:
        """Three recurrent layers for each that attends, their state twice as wide as the model."""
        shape = ModelShape(4, 32, head_dim=8, vocab_size=97, family="qwen3_5")
        config, model = shape.config(), build_model(shape, torch.device("cpu"), torch.float32, "sdpa")
        assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"] and str(shape) == "4x32 hybrid"
        assert model.model.layers[0].linear_attn.out_proj.weight.shape == (32, 64)
        assert model.model.layers[3].self_attn.k_proj.weight.shape == (16, 32)

    def test_an_unknown_family(self) -> None:
        with pytest.raises(UserError, match=r"models: family must be one of qwen3, qwen3_5, got qwen4"):
            ModelShape(family="qwen4")  # type: ignore[arg-type]

    def test_the_weights_are_the_same_every_time(self) -> None:
        first, second = (build_model(SHAPE, torch.device("cpu"), torch.float32, "sdpa").state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("name", "value"), [("tree", "deep"), ("mode", "backward")])
def test_an_unknown_choice(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} must be one of .*, got {value}"):
        replace(FLAT, **{name: value})
