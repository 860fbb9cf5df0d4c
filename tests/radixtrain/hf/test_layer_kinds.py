"""Layers of several kinds, counted."""

import pytest
import torch
from transformers import AutoModel, NemotronHConfig, Qwen3_5TextConfig, Zamba2Config

from radixtrain.hf.layer_kinds import ALIKE, LayerKinds, kinds_of_mixers

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
DENSE = {**SIZES, "intermediate_size": 64, "head_dim": 8}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
LAYERS = ["mamba", "mlp", "full_attention", "mlp"]


def decoder_of(config):
    with torch.device("meta"):
        return AutoModel.from_config(config)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        pytest.param(
            Qwen3_5TextConfig(**DENSE, num_hidden_layers=8), LayerKinds(attention=0.25, mixers=0.75), id="three of four"
        ),
        pytest.param(
            NemotronHConfig(**DENSE, **MAMBA, layers_block_type=LAYERS),
            LayerKinds(attention=0.25, mlps=0.5, mixers=0.25),
            id="a mixer, an MLP or attention",
        ),
        pytest.param(
            Zamba2Config(
                **SIZES,
                num_hidden_layers=4,
                layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
                num_mem_blocks=1,
                mamba_d_state=8,
                n_mamba_heads=4,
                mamba_headdim=16,
                mamba_ngroups=1,
            ),
            LayerKinds(attention=0.5, mlps=0.5, mixers=1.0),
            id="shared attention",
        ),
    ],
)
def test_hybrids(config, kinds):
    assert LayerKinds.of(decoder_of(config)) == kinds


def test_layers_that_are_alike(tiny_qwen3):
    assert LayerKinds.of(tiny_qwen3().model) is ALIKE
    assert (ALIKE.attention, ALIKE.mlps, ALIKE.mixers) == (1.0, 1.0, 0.0)


def test_mixers_of_the_same_class_and_shapes_are_one_kind():
    decoder = decoder_of(Qwen3_5TextConfig(**DENSE, num_hidden_layers=8))
    assert [number for _, number in kinds_of_mixers(decoder)] == [6]
    first = decoder.layers[0].linear_attn
    first.out_proj = torch.nn.Linear(1, 1, device="meta")
    assert [(mixer is first, number) for mixer, number in kinds_of_mixers(decoder)] == [(True, 1), (False, 5)]
