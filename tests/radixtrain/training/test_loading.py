"""What the command line refuses to load, and what it loads."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from radixtrain.errors import UserError
from radixtrain.training.loading import auto_class, load_model, load_trainable

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
    with pytest.raises(UserError, match=r"its class has no sdpa attention; set model\.attn_implementation: eager"):
        load_model(str(tmp_path), "float32", "sdpa")
    model = load_trainable(settings(tmp_path, attn_implementation="eager"))
    assert model.config._attn_implementation == "radix_eager"
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_all_linear_without_the_layer_that_peft_refuses(tmp_path):
    """PEFT says to remove it from `target_modules`, which has no list then."""
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
    FalconH1ForCausalLM(FalconH1Config(**SIZES, **mamba)).save_pretrained(tmp_path)
    lora = {"use_peft": True, "lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
    others = ["down_proj", "gate_proj", "in_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    reason = "all-linear has out_proj, which PEFT refuses for the Mamba layers of this model; name the others: "
    with pytest.raises(UserError, match=re.escape(f"{reason}[{', '.join(others)}]")):
        load_trainable(settings(tmp_path, **lora, lora_target_modules="all-linear"))
    with pytest.raises(
        UserError, match=r"no layer has a name of \['in_prj'\]; linear layers are down_proj, .*in_proj, "
    ):
        load_trainable(settings(tmp_path, **lora, lora_target_modules=["in_prj"]))
    with pytest.raises(UserError, match=r"no layer has the name 'in_prj', did you mean in_proj\?"):
        load_trainable(settings(tmp_path, **lora, lora_target_modules=["q_proj", "in_prj"]))
    adapted = load_trainable(settings(tmp_path, **lora, lora_target_modules=others))
    assert {path.split(".")[-4] for path, x in adapted.named_parameters() if x.requires_grad} == set(others)


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


@pytest.mark.parametrize("wrote", [Qwen3_5ForConditionalGeneration, Qwen3_5ForCausalLM])
def test_a_checkpoint_is_loaded_by_the_class_that_wrote_it(tmp_path, wrote):
    """`AutoModelForCausalLM` would leave the tower for images of Qwen3.5 out, and `fit` would save the model so."""
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    text = {**SIZES, **linear, "linear_value_head_dim": 8, "num_hidden_layers": 4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    is_text = wrote is Qwen3_5ForCausalLM
    config = Qwen3_5TextConfig(**text) if is_text else Qwen3_5Config(text_config=text, vision_config=vision)
    wrote(config).save_pretrained(tmp_path)
    model = load_trainable(settings(tmp_path))
    assert type(model) is wrote and model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_a_checkpoint_that_does_not_name_its_class(tmp_path):
    """As those that were converted by hand."""
    MixtralConfig(**SIZES).save_pretrained(tmp_path)
    assert auto_class(str(tmp_path)) is AutoModelForCausalLM
