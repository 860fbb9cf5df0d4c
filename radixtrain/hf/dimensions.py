"""The dimensions of a Hugging Face decoder, and which kinds of layers it has.

Configurations name dimensions in several ways. `PreTrainedConfig.attribute_map` translates most of these (GPT-2's
`n_embd` is `hidden_size`); the rest is here: what a missing value means, multi-query attention, latent attention (MLA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.modules import attends, mixers_of, text_layers

MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """The dimensions of a text decoder, by the names of most configurations.

    intermediate_size: width of a layer's MLP, the mean if layers differ; None if the configuration does not say it, as
        for some mixtures of experts.
    num_key_value_heads: of the keys and values that attention gets, the most if layers differ; in latent attention one
        for each query head.
    head_dim: of queries and keys, the widest if layers differ. In latent attention qk_nope_head_dim + qk_rope_head_dim.
    v_head_dim: of values.
    q_lora_rank, kv_lora_rank: widths between the two matrices that make the queries, and the keys and values, in latent
        attention; None for a single matrix.
    qk_rope_head_dim: of the key that all heads share in latent attention; 0 in any other.
    """

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    intermediate_size: int | None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelDimensions:
        """Read a configuration, or the text part of a multimodal one. Raises UserError that names what is missing."""
        config = config.get_text_config()
        sizes = {name: _number(config, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
        heads, mlp_width = _number(config, "num_attention_heads"), _mlp_width(config, sizes["hidden_size"])
        if _is_latent(config):
            attention = _latent_attention(config, heads)
        else:
            head_dim = _largest(config, "head_dim") or sizes["hidden_size"] // heads
            v_head_dim = getattr(config, "v_head_dim", None) or head_dim
            key_value_heads = _num_key_value_heads(config, heads)
            attention = {"num_key_value_heads": key_value_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        return cls(**sizes, num_attention_heads=heads, intermediate_size=mlp_width, **attention)

    @property
    def widest_head_dim(self) -> int:
        """Return the head dim that tree attention runs with: the narrower of queries and values get zeros."""
        return max(self.head_dim, self.v_head_dim)

    @property
    def attention_parameters(self) -> int:
        """Count the parameters in the matrices of one layer's attention."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * (self.head_dim - self.qk_rope_head_dim)
        values = self.num_key_value_heads * self.v_head_dim
        outputs = self.num_attention_heads * self.v_head_dim
        inputs = self._projection(queries, self.q_lora_rank) + self._projection(keys + values, self.kv_lora_rank)
        return inputs + self.hidden_size * (self.qk_rope_head_dim + outputs)

    def mlp_parameters(self, intermediate_size: int) -> int:
        """Count the parameters in the matrices of one layer's MLP of this width, counted as gated: three of them."""
        return 3 * self.hidden_size * intermediate_size

    def _projection(self, width: int, rank: int | None) -> int:
        """Count the parameters from the hidden size to this width, directly or by two matrices."""
        return self.hidden_size * width if rank is None else rank * (self.hidden_size + width)


def _number(config: PreTrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise UserError(f"{type(config).__name__} does not say its {name}, which has to be a number: got {value}")
    return value


def _mlp_width(config: PreTrainedConfig, hidden_size: int) -> int | None:
    """Return the width of the MLP. None under a name of GPT-2's time means 4 x hidden_size, as documented."""
    for name in MLP_WIDTHS:
        if hasattr(config, name):
            width = getattr(config, name)
            if isinstance(width, (list, tuple)):  # one for each layer: Gemma 3n
                return sum(width) // len(width)
            return width or 4 * hidden_size
    return None


def _num_key_value_heads(config: PreTrainedConfig, num_attention_heads: int) -> int:
    """Return the number of key and value heads: Falcon names it differently, others default to the query heads."""
    if hasattr(config, "new_decoder_architecture"):
        several = config.new_decoder_architecture or not config.multi_query
        return config.num_kv_heads if several else 1
    return _largest(config, "num_key_value_heads") or num_attention_heads


def _largest(config: PreTrainedConfig, name: str) -> int | None:
    """Read a number of a model; the largest over its layers if they differ and transformers gives none (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return max(getattr(layer, name) for layer in config.per_layer_config)


def _is_latent(config: PreTrainedConfig) -> bool:
    return all(getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))


def _latent_attention(config: PreTrainedConfig, num_attention_heads: int) -> dict[str, Any]:
    """Return the dimensions of latent attention: heads have their own keys and values but share those of positions."""
    return {
        "num_key_value_heads": num_attention_heads,
        "head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "v_head_dim": _number(config, "v_head_dim"),
        "q_lora_rank": getattr(config, "q_lora_rank", None),
        "kv_lora_rank": getattr(config, "kv_lora_rank", None),
        "qk_rope_head_dim": config.qk_rope_head_dim,
    }


@dataclass(frozen=True, kw_only=True)
class LayerKinds:
    """What the average layer has: 1, 1 and 0 in a model without recurrent layers.

    attention, mlps: layers that attend, and those with an MLP or experts, over all layers.
    mixers: modules with a recurrent state, over all layers.
    """

    attention: float = 1.0
    mlps: float = 1.0
    mixers: float = 0.0

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> LayerKinds:
        """Count the kinds of a text decoder's layers; a module that several layers share counts for each of them."""
        num_mixers, layers = len(mixers_of(decoder)), text_layers(decoder)
        if not num_mixers or not layers:
            return ALIKE
        attention = sum(any(attends(type(module)) for module in layer.modules()) for layer in layers)
        mlps = sum(map(_has_mlp, layers))
        return cls(attention=attention / len(layers), mlps=mlps / len(layers), mixers=num_mixers / len(layers))


ALIKE = LayerKinds()  # as in a model without recurrent layers


def kinds_of_mixers(decoder: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """List one mixer of each kind, and how many there are: same class, same shapes."""
    kinds: dict[tuple[Any, ...], list[nn.Module]] = {}
    for mixer in mixers_of(decoder).values():
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in mixer.named_parameters())
        kinds.setdefault((type(mixer), shapes), []).append(mixer)
    return [(alike[0], len(alike)) for alike in kinds.values()]


def _has_mlp(layer: nn.Module) -> bool:
    """Return whether there is a matrix outside of attention and mixers."""
    mixing = [*mixers_of(layer).values(), *(module for module in layer.modules() if attends(type(module)))]
    inside = {id(parameter) for module in mixing for parameter in module.parameters()}
    return any(parameter.ndim > 1 and id(parameter) not in inside for parameter in layer.parameters())
