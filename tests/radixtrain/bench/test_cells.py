"""Shapes: their defaults, their names, the same weights every time."""

from typing import Any

import torch

from radixtrain.bench.cells import ModelShape, build_model

CPU = torch.device("cpu")


def test_a_shape_without_details_follows_from_its_width() -> None:
    config = ModelShape(hidden_size=256).config()
    sizes = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert sizes == (768, 4, 2, 64)
    assert (str(ModelShape(2, 128)), str(ModelShape(name="Qwen3-0.6B"))) == ("2x128", "Qwen3-0.6B")


def test_a_hybrid_has_three_recurrent_layers_for_each_that_attends() -> None:
    shape = ModelShape(4, 32, head_dim=8, vocab_size=97, family="qwen3_5")
    config, model = shape.config(), build_model(shape, CPU, torch.float32, "sdpa")
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"] and str(shape) == "4x32 hybrid"
    assert model.model.layers[0].linear_attn.out_proj.weight.shape == (32, 64)
    assert model.model.layers[3].self_attn.k_proj.weight.shape == (16, 32)


def test_the_weights_are_the_same_every_time(shape: ModelShape, model: Any) -> None:
    second = build_model(shape, CPU, torch.float32, "sdpa").state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in model.state_dict().items())
