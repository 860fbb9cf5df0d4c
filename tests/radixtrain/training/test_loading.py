"""What the command line refuses to load, and what it loads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from radixtrain.errors import UserError
from radixtrain.training.loading import load_model, load_trainable

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"num_local_experts": 2, "num_experts_per_tok": 1},
}


def settings(path: Any, **changes: Any) -> SimpleNamespace:
    loading = {"model_name_or_path": str(path), "dtype": "float32", "attn_implementation": "sdpa"}
    preparing = {"dedup": True, "attention": "auto", "kernel": "auto", "allow_dropout": None}
    added = {"use_peft": False, "activation_checkpointing": False}
    return SimpleNamespace(**{**loading, **preparing, **added, **changes})


@pytest.mark.parametrize("dedup", [True, False])
def test_a_router_loss_is_refused(tmp_path, dedup):
    MixtralForCausalLM(MixtralConfig(**SIZES, output_router_logits=True)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adds a router loss \(output_router_logits: true in its config\.json\)"):
        load_trainable(settings(tmp_path, dedup=dedup))


def test_a_router_without_its_loss_is_loaded(tmp_path):
    MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained(tmp_path)
    assert load_trainable(settings(tmp_path)).training


def test_sinks_need_eager_beside_the_tree(tmp_path):
    GptOssForCausalLM(GptOssConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"sdpa has no soft-cap and no sinks; set model\.attn_implementation: eager"):
        load_model(str(tmp_path), "float32", "sdpa")
    model = load_trainable(settings(tmp_path, attn_implementation="eager"))
    assert model.config._attn_implementation == "radix_eager"
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_float16_weights_need_a_loss_scale(tmp_path):
    """With `dtype: auto` the first step made them NaN."""
    MixtralForCausalLM(MixtralConfig(**SIZES)).half().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.dtype 'auto': the checkpoint is float16, which needs a loss scale"):
        load_trainable(settings(tmp_path, dtype="auto"))
    assert load_trainable(settings(tmp_path)).dtype == torch.float32


def test_a_multimodal_checkpoint(tmp_path):
    """Qwen2.5-VL is no entry of `AutoModelForCausalLM`."""
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    model = load_trainable(settings(tmp_path))
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
