"""Which modules carry a state, by their source."""

from functools import cache

import pytest
from families import FAMILIES
from older_transformers import NEEDS_FORKS
from torch import nn

from radixtrain.hf.backbone import parts_of
from radixtrain.hf.modules import (
    layer_around,
    mixers_of,
    num_attention_layers,
    text_layers,
)

# Class -> the mixers by path, and the number of layers that attend.
MODELS = {
    "Qwen3_5ForCausalLM": ({"layers.0.linear_attn": "Qwen3_5GatedDeltaNet"}, 1),
    "FalconH1ForCausalLM": (
        {"layers.0.mamba": "FalconH1Mixer", "layers.1.mamba": "FalconH1Mixer"},
        2,
    ),  # both attend too
    "NemotronHForCausalLM": (
        {"layers.0.mixer": "NemotronHMamba2Mixer"},
        1,
    ),  # a mixer, experts, attention, an MLP
    "Lfm2ForCausalLM": ({"layers.0.conv": "Lfm2ShortConv"}, 1),
    "JambaForCausalLM": (
        {"layers.0.mamba": "JambaMambaMixer", "layers.1.mamba": "JambaMambaMixer"},
        0,
    ),
    "ZayaForCausalLM": (
        {"layers.0.self_attn.qkv_proj": "ZayaCCAProjection", "layers.1.self_attn.qkv_proj": "ZayaCCAProjection"},
        2,
    ),
    "Qwen3ForCausalLM": ({}, 2),
    "MiniMaxForCausalLM": ({}, 2),  # its linear attention has a cache of its own
}


@cache
def decoder_of(model_class):
    family = next(each for each in FAMILIES if each.model_class == model_class)
    return parts_of(family.build()).decoder


@NEEDS_FORKS
@pytest.mark.parametrize("model_class", MODELS)
def test_models(model_class):
    decoder, (mixers, num_attending) = decoder_of(model_class), MODELS[model_class]
    found = mixers_of(decoder)
    assert {path: type(module).__name__ for path, module in found.items()} == mixers
    assert num_attention_layers(decoder) == num_attending
    for path, module in found.items():
        assert decoder.get_submodule(path) is module
        _, index, *_ = path.split(".")
        assert layer_around(decoder, path) is text_layers(decoder)[int(index)]


@NEEDS_FORKS
def test_a_shared_block_counts_once_and_its_layers_hold_the_mixers():
    """In Zamba 2 one attention block is in several layers, each with a mixer of its own inside."""
    decoder = decoder_of("Zamba2ForCausalLM")
    layers = text_layers(decoder)
    shared = [layer.shared_transformer.self_attn for layer in layers if hasattr(layer, "shared_transformer")]
    assert num_attention_layers(decoder) == len({id(module) for module in shared}) > 0
    assert [layer_around(decoder, path) for path in mixers_of(decoder)] == layers, "the layer, and not a part of it"


@NEEDS_FORKS
def test_only_those_of_the_text():
    """Neither the convolutions and layers of a vision encoder count, nor text layers that attend to images."""
    decoder = decoder_of("Qwen3_5ForConditionalGeneration")
    assert list(mixers_of(decoder)) == ["layers.0.linear_attn"]
    assert num_attention_layers(decoder) == 1
    assert num_attention_layers(decoder_of("MllamaForCausalLM")) == 2
    assert len(text_layers(decoder_of("MllamaForCausalLM"))) == 3


class Protocol(nn.Module):
    """Speaks the cache protocol."""

    def forward(self, x, cache_params=None):
        return x if cache_params is None else cache_params.update_conv_state(x, 0)


class Inherits(Protocol):
    pass


class Mentions(nn.Module):
    """Passes a cache on and asks its has_previous_state, which does not make it a mixer."""

    def __init__(self):
        super().__init__()
        self.inner = Protocol()

    def forward(self, x, past_key_values=None):
        assert not past_key_values.has_previous_state(0)
        return self.inner(x, past_key_values)


def test_by_its_source_or_that_of_what_it_inherits_from():
    model = nn.ModuleDict({"one": Protocol(), "two": Inherits(), "three": Mentions(), "four": nn.Conv1d(2, 2, 3)})
    assert list(mixers_of(model)) == ["one", "two", "three.inner"]


def test_a_class_without_a_source_file():
    """Typed at a prompt, as it were."""
    namespace = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x, state=None): return x.update_conv_state(x)", namespace)
    assert list(mixers_of(nn.ModuleList([namespace["Typed"]()]))) == ["0"]
