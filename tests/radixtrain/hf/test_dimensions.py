"""Dimensions by real configurations."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from older_transformers import NEEDS_FORKS
from tiny_models import tiny_model
from torch import nn
from transformers import (
    AutoModel,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from radixtrain.errors import UserError
from radixtrain.hf.dimensions import ALIKE, LayerKinds, ModelDimensions, kinds_of_mixers

SIZES = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 160}
WIDE = {**TEXT, "head_dim": 32}
LATENT = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 40, "q_lora_rank": 20, "kv_lora_rank": 12}
OLD_NAMES = {"vocab_size": 99, "n_embd": 64, "n_layer": 3, "n_head": 4}

# Configuration; heads of keys and values, head dim of queries and keys, head dim of values, width of the MLP.
TABLE = {
    "Qwen3": (Qwen3Config(**WIDE), (2, 32, 32, 160)),
    "Llama": (LlamaConfig(**TEXT), (2, 16, 16, 160)),
    "Llama, a head of keys for each of queries": (LlamaConfig(**SIZES, intermediate_size=160), (4, 16, 16, 160)),
    "Gemma 3, text": (Gemma3TextConfig(**WIDE), (2, 32, 32, 160)),
    "Gemma 3, multimodal": (Gemma3Config(text_config=WIDE), (2, 32, 32, 160)),
    "Gemma 3n, a width for each layer": (
        Gemma3nTextConfig(**{**WIDE, "intermediate_size": [100, 160, 220]}),
        (2, 32, 32, 160),
    ),
    "Qwen2-VL": (Qwen2VLConfig(text_config=TEXT), (2, 16, 16, 160)),
    "Mixtral": (MixtralConfig(**TEXT), (2, 16, 16, 160)),
    "Qwen3 MoE": (Qwen3MoeConfig(**WIDE), (2, 32, 32, 160)),
    "DeepSeek-V3": (DeepseekV3Config(**SIZES, **LATENT, intermediate_size=160), (4, 32, 40, 160)),
    "DeepSeek-V3, one matrix of queries": (
        DeepseekV3Config(**SIZES, **{**LATENT, "q_lora_rank": None}, intermediate_size=160),
        (4, 32, 40, 160),
    ),
    "GPT-NeoX": (GPTNeoXConfig(**SIZES, intermediate_size=160), (4, 16, 16, 160)),
    "GPT-2": (GPT2Config(**OLD_NAMES), (4, 16, 16, 256)),
    "GPT-2, n_inner": (GPT2Config(**OLD_NAMES, n_inner=160), (4, 16, 16, 160)),
    "GPT-BigCode, multi-query": (GPTBigCodeConfig(**OLD_NAMES), (1, 16, 16, 256)),
    "Falcon, multi-query": (FalconConfig(**SIZES), (1, 16, 16, 256)),
    "Falcon, grouped": (FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2), (2, 16, 16, 256)),
    "Falcon, a head of keys for each of queries": (FalconConfig(**SIZES, multi_query=False), (4, 16, 16, 256)),
    "OPT": (OPTConfig(**SIZES, ffn_dim=160, word_embed_proj_dim=64), (4, 16, 16, 160)),
    "BLOOM says no width": (BloomConfig(vocab_size=99, hidden_size=64, n_layer=3, n_head=4), (4, 16, 16, None)),
}


@pytest.mark.parametrize("name", TABLE)
def test_dimensions(name):
    config, expected = TABLE[name]
    found = ModelDimensions.of(config)
    assert (found.num_key_value_heads, found.head_dim, found.v_head_dim, found.intermediate_size) == expected
    sizes = found.vocab_size, found.hidden_size, found.num_hidden_layers, found.num_attention_heads
    assert sizes == (99, 64, 3, 4)
    assert found.widest_head_dim == max(expected[1:3])
    if name != "Gemma 3n, a width for each layer":
        assert ModelDimensions.of(config.get_text_config()).attention_parameters == counted(config)


def test_the_widest_head_dim_of_layers_that_differ():
    config = getattr(transformers, "Gemma4TextConfig", Qwen3Config)(**WIDE, global_head_dim=64)
    if not getattr(config, "is_heterogeneous", False):
        pytest.skip("a newer transformers has a head dim for each layer of Gemma 4")
    found = ModelDimensions.of(config)
    assert (found.num_key_value_heads, found.head_dim, found.v_head_dim) == (2, 64, 64)


def counted(config):
    """Parameters in the matrices of an attention layer of the text."""
    with torch.device("meta"):
        model = AutoModel.from_config(config.get_text_config())
    attention = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    return sum(parameter.numel() for parameter in attention.parameters() if parameter.ndim == 2)


def test_a_gated_mlp_has_three_matrices():
    config, _ = TABLE["Llama"]
    with torch.device("meta"):
        mlp: nn.Module = AutoModel.from_config(config).layers[0].mlp
    assert ModelDimensions.of(config).mlp_parameters(160) == sum(weight.numel() for weight in mlp.parameters())


def test_what_is_not_said_is_named():
    with pytest.raises(UserError, match="MambaConfig does not say its num_attention_heads"):
        ModelDimensions.of(MambaConfig())
    lists = SimpleNamespace(num_hidden_layers=3, hidden_size=[8, 16])
    lists.get_text_config = lambda: lists
    with pytest.raises(UserError, match=r"hidden_size, which has to be a number: got \[8, 16\]"):
        ModelDimensions.of(lists)


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


@NEEDS_FORKS
@pytest.mark.parametrize(("model_class", "settings", "kinds"), HYBRIDS)
def test_hybrids(model_class, settings, kinds):
    assert LayerKinds.of(tiny_model(model_class, num_hidden_layers=4, **settings).model) == kinds


def test_layers_that_are_alike(tiny_qwen3):
    assert LayerKinds.of(tiny_qwen3().model) is ALIKE
    assert (ALIKE.attention, ALIKE.mlps, ALIKE.mixers) == (1.0, 1.0, 0.0)


@NEEDS_FORKS
def test_mixers_of_the_same_class_and_shapes_are_one_kind():
    decoder = tiny_model("Qwen3_5ForCausalLM", num_hidden_layers=4, layer_types=QWEN3_5).model
    assert [number for _, number in kinds_of_mixers(decoder)] == [3]
    first = decoder.layers[0].linear_attn
    first.out_proj = torch.nn.Linear(1, 1)
    assert [(mixer is first, number) for mixer, number in kinds_of_mixers(decoder)] == [(True, 1), (False, 2)]
