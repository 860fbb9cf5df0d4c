"""Layers of several kinds, counted."""

import pytest
import torch
from tiny_models import tiny_model

from radixtrain.hf.layer_kinds import ALIKE, LayerKinds, kinds_of_mixers

# One in four of Qwen3.5 attends; a layer of Nemotron-H is a mixer, an MLP or attention; Zamba 2 shares its attention.
QWEN3_5 = ["linear_attention"] * 3 + ["full_attention"]
NEMOTRON_H = ["mamba", "mlp", "full_attention", "mlp"]
ZAMBA = ["linear_attention", "hybrid"] * 2
HYBRIDS = [
    ("Qwen3_5ForCausalLM", {"layer_types": QWEN3_5}, LayerKinds(attention=0.25, mixers=0.75)),
    ("NemotronHForCausalLM", {"layers_block_type": NEMOTRON_H}, LayerKinds(attention=0.25, mlps=0.5, mixers=0.25)),
    (
        "Zamba2ForCausalLM",
        {"layers_block_type": ZAMBA, "layer_types": ZAMBA, "attention_hidden_size": 64, "num_mem_blocks": 1},
        LayerKinds(attention=0.5, mlps=0.5, mixers=1.0),
    ),
]


@pytest.mark.parametrize(("model_class", "settings", "kinds"), HYBRIDS)
def test_hybrids(model_class, settings, kinds):
    assert LayerKinds.of(tiny_model(model_class, num_hidden_layers=4, **settings).model) == kinds


def test_layers_that_are_alike(tiny_qwen3):
    assert LayerKinds.of(tiny_qwen3().model) is ALIKE
    assert (ALIKE.attention, ALIKE.mlps, ALIKE.mixers) == (1.0, 1.0, 0.0)


def test_mixers_of_the_same_class_and_shapes_are_one_kind():
    decoder = tiny_model("Qwen3_5ForCausalLM", num_hidden_layers=4, layer_types=QWEN3_5).model
    assert [number for _, number in kinds_of_mixers(decoder)] == [3]
    first = decoder.layers[0].linear_attn
    first.out_proj = torch.nn.Linear(1, 1)
    assert [(mixer is first, number) for mixer, number in kinds_of_mixers(decoder)] == [(True, 1), (False, 2)]
