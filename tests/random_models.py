"""Tiny Hugging Face models with random weights of order one, so that no gradient vanishes beside another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

__all__ = ["random_hybrid", "random_qwen3"]

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def random_qwen3(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    """Two layers with grouped heads; changes go to `Qwen3Config`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    own = {"head_dim": 8, "tie_word_embeddings": True, "max_position_embeddings": 512}
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **HEADS, **own, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale, shift = (0.2, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
    return model


def random_hybrid(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A layer with a recurrent state and one that attends.

    kind: "Qwen3.5" (gated delta rule), "Bamba" (state space) or "LFM2" (short convolution). changes: of its
        configuration.
    """
    import transformers

    own = {"pad_token_id": 0, "max_position_embeddings": 128}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    mamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    }
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen3.5": ("Qwen3_5", {**delta, "layer_types": ["linear_attention", "full_attention"]}),
        "Bamba": ("Bamba", mamba),
        "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    }
    name, settings = kinds[kind]
    config = getattr(transformers, f"{name}TextConfig" if name == "Qwen3_5" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**{**SIZES, **HEADS, **own, **settings, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + torch.ones_like(noise) / 2 if parameter.ndim < 2 else noise)
    return model
