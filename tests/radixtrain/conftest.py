"""A tiny Qwen3 with weights that keep every gradient alive."""

from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def tiny_qwen3() -> Callable[..., Qwen3ForCausalLM]:
    """Two layers, grouped heads, random weights of order one; keyword arguments go to `Qwen3Config`."""

    def build(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
        generator = torch.Generator().manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, "max_position_embeddings": 512, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                scale, shift = (0.2, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
        return model

    return build
