"""Tiny models of any Hugging Face class: two layers, 32 wide, 64 tokens, random weights of order one.

Each configuration class has names of its own for its sizes (`hidden_size`, `n_embd`, `d_model`). `tiny_config` replaces
the sizes that the default has by the small ones below, in its parts too (`text_config`, `vision_config`), and then
applies the settings of the family.
"""

import inspect
import re
from typing import Any

import pytest
import torch
import transformers
from older_transformers import NEEDS_FORKS, skip_missing
from torch import nn
from transformers import PreTrainedConfig

from radixtrain.versions import transformers_is_before

WINDOW = 4  # of every sliding window and chunk, in tokens; the sequences of a test are longer
SMALL = {
    32: """hidden_size d_model n_embd embed_dim emb_dim embedding_size word_embed_proj_dim output_dim out_hidden_size
        lru_width projection_dim attention_hidden_size intermediate_size_mlp""",
    64: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dff dim_ff d_ff n_inner d_inner ffn_hidden_size
        feed_forward_size mamba_d_ssm vocab_size vocab_size_per_layer_input""",
    16: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size q_lora_rank mamba_d_head mamba_head_dim mamba_headdim""",
    12: "qk_head_dim",
    8: """head_dim dim_head d_head d_kv kv_channels swa_head_dim kv_lora_rank o_lora_rank qk_nope_head_dim
        index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size
        mamba_chunk_size chunk_size hidden_size_per_layer_input num_mel_bins""",
    6: "v_head_dim",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        swa_num_attention_heads qk_rope_head_dim rotary_dim num_experts num_local_experts n_routed_experts
        moe_num_experts index_topk mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank image_seq_length
        mm_tokens_per_image num_image_tokens""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers depth num_key_value_heads swa_num_key_value_heads kv_n_heads num_experts_per_tok
        num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_group num_expert_group zero_expert_num o_groups
        index_n_heads linear_num_heads linear_num_key_heads linear_num_value_heads n_mamba_heads mamba_expand
        spatial_merge_size temporal_patch_size num_query_tokens""",
    1: """topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers
        moe_layer_start_index n_groups mamba_n_groups""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_source_positions
        max_target_positions context_length""",
    28: "image_size",
    14: "patch_size",
    3: "num_channels in_channels",
}
WINDOWS = "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size"
TINY = {name: size for size, names in SMALL.items() for name in names.split()}
TINY |= dict.fromkeys(WINDOWS.split(), WINDOW) | {"local_attention": 2 * WINDOW}  # which counts both sides
# Ids inside the vocabulary that no sequence of the test contains.
TOKENS = """bos_token_id eos_token_id decoder_start_token_id image_token_id image_token_index video_token_id
    video_token_index audio_token_id audio_token_index vision_start_token_id vision_end_token_id boi_token_id
    eoi_token_id boi_token_index eoi_token_index boa_token_id eoa_token_id eoa_token_index image_start_token_id
    image_end_token_id audio_start_token_id audio_end_token_id"""
TINY |= {"pad_token_id": 0, **{name: 40 + index for index, name in enumerate(TOKENS.split())}}
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "indexer_types")


def tiny_config(config_class: Any, settings: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of the smallest sizes. settings: its own, those of its parts as dictionaries of their own."""
    default = _default(config_class, settings)
    alias = config_class.attribute_map
    values = {**vars(default), **{name: getattr(default, name, None) for name in alias}}
    parts = config_class.sub_configs
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        if name in parts or name in alias or value is None or isinstance(value, (list, tuple, dict)):
            continue
        if re.search("drop|jitter", name) and isinstance(value, float):
            chosen[name] = 0.0
        elif name in TINY:
            chosen[name] = TINY[name]
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    if "head_dim" in chosen and values.get("qk_rope_head_dim"):
        chosen["head_dim"] = 4 * max(1, values["head_dim"] // values["qk_rope_head_dim"])
    chosen |= _one_layer_of_each_kind(config_class, values, settings)
    made = {name: _tiny_part(default, name, settings.get(name, {})) for name in parts}
    chosen |= {name: part and part.to_diff_dict() for name, part in made.items()}
    return config_class(**{**chosen, **{name: value for name, value in settings.items() if name not in parts}})


def tiny_model(model_class: str, seed: int = 0, **settings: Any) -> Any:
    """A model of that class in training mode, whose weights are of order one, so that every gradient is alive.

    model_class: its name in transformers. settings: what its configuration has besides the small sizes.
    """
    torch.manual_seed(seed)
    cls = getattr(transformers, model_class, None) or skip_missing(model_class)
    return order_one(cls(tiny_config(cls.config_class, settings)), seed)


def tiny_qwen3(seed: int = 0, **settings: Any) -> Any:
    """A Qwen3 of 50 tokens, with tied embeddings."""
    own = {"vocab_size": 50, "tie_word_embeddings": True, "max_position_embeddings": 512}
    return tiny_model("Qwen3ForCausalLM", seed, **{**own, **settings})


def tiny_hybrid(kind: str, seed: int = 0, **settings: Any) -> Any:
    """A layer with a recurrent state and one that attends.

    kind: "Qwen3.5" (gated delta rule), "Bamba" (state space) or "LFM2" (short convolution).
    """
    delta = {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen3.5": ("Qwen3_5ForCausalLM", delta),
        "Bamba": ("BambaForCausalLM", {"mamba_d_head": 16, "attn_layer_indices": [1]}),
        "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    }
    model_class, own = kinds[kind]
    if transformers_is_before("5.21"):
        pytest.skip(NEEDS_FORKS.kwargs["reason"])
    return tiny_model(model_class, seed, **{"vocab_size": 50, **own, **settings})


def order_one(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + parameter if parameter.ndim < 2 else noise)
    return model


def _default(config_class: Any, settings: dict[str, Any]) -> PreTrainedConfig:
    try:
        return config_class()
    except ValueError:  # of parts that do not fit each other
        return config_class(**settings)


def _one_layer_of_each_kind(config_class: Any, values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """`layer_types` and their like: the distinct ones of the default, at least two layers unless a number is given."""
    kinds: dict[str, list[str]] = {}
    for name in KINDS_OF_LAYERS:
        given = settings.get(name) or list(dict.fromkeys(values.get(name) or ()))
        attribute = inspect.getattr_static(config_class, config_class.attribute_map.get(name, name), None)
        if given and not isinstance(attribute, property):
            kinds[name] = given
    layers = settings.get("num_hidden_layers", max([2, *map(len, kinds.values())]))
    chosen: dict[str, Any] = {name: (given + [given[-1]] * layers)[:layers] for name, given in kinds.items()}
    return {**chosen, "num_hidden_layers": layers} if layers > 2 else chosen


def _tiny_part(default: PreTrainedConfig, name: str, settings: dict[str, Any] | None) -> PreTrainedConfig | None:
    part = getattr(default, name, None)
    if settings is None or (part is None and "model_type" not in settings):
        return None
    rest = dict(settings)
    kind = rest.pop("model_type", None)
    return tiny_config(type(transformers.AutoConfig.for_model(kind)) if kind else type(part), rest)
