"""LoRA, DoRA and 4-bit weights on a loaded model, what is refused by name, and what is written in the end."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, FalconH1Config, FalconH1ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from radixtrain.errors import UserError
from radixtrain.training.start import adapters
from radixtrain.training.start.adapters import check_quantized, merged
from radixtrain.training.start.loading import load_trainable

pytest.importorskip("peft", reason="adapters need peft: pip install 'radixtrain[peft]'")
needs_bitsandbytes = pytest.mark.skipif(
    adapters.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install 'radixtrain[qlora]'"
)

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
}
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def settings(path: Any, **changes: Any) -> SimpleNamespace:
    loading = {"model_name_or_path": str(path), "dtype": "float32", "attn_implementation": "sdpa"}
    preparing = {"dedup": True, "attention": "auto", "kernel": "auto", "allow_dropout": None}
    lora = {"use_peft": True, "lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
    kinds = {"use_dora": False, "use_rslora": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4"}
    bits = {"bnb_4bit_compute_dtype": None, "bnb_4bit_use_double_quant": False, "activation_checkpointing": False}
    return SimpleNamespace(**{**loading, **preparing, **lora, **kinds, **bits, **changes})


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def without_bitsandbytes(monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)


def test_all_linear_without_the_layer_that_peft_refuses(tmp_path):
    """PEFT says to remove it from `target_modules`, which has no list then."""
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
    FalconH1ForCausalLM(FalconH1Config(**SIZES, **mamba)).save_pretrained(tmp_path)
    others = ["down_proj", "gate_proj", "in_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    reason = "all-linear has out_proj, which PEFT refuses for the Mamba layers of this model; name the others: "
    with pytest.raises(UserError, match=re.escape(f"{reason}[{', '.join(others)}]")):
        load_trainable(settings(tmp_path, lora_target_modules="all-linear"))
    with pytest.raises(
        UserError, match=r"no layer has a name of \['in_prj'\]; linear layers are down_proj, .*in_proj, "
    ):
        load_trainable(settings(tmp_path, lora_target_modules=["in_prj"]))
    with pytest.raises(UserError, match=r"no layer has the name 'in_prj', did you mean in_proj\?"):
        load_trainable(settings(tmp_path, lora_target_modules=["q_proj", "in_prj"]))
    adapted = load_trainable(settings(tmp_path, lora_target_modules=others))
    assert {path.split(".")[-4] for path, x in adapted.named_parameters() if x.requires_grad} == set(others)


def filled(model: Any) -> Any:
    """With adapters that are not zero, in evaluation mode."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    return model.eval()


def test_the_options_of_peft(folder):
    dora, plain = (load_trainable(settings(folder, use_dora=use)) for use in (True, False))
    assert any("lora_magnitude_vector" in name for name, p in dora.named_parameters() if p.requires_grad)
    assert not any("lora_magnitude_vector" in name for name, _ in plain.named_parameters())
    scaled = load_trainable(settings(folder, use_rslora=True))
    of = [model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] for model in (plain, scaled)]
    assert of == [4 / 2, pytest.approx(4 / 2**0.5)]


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("bits", [{}, pytest.param({"load_in_4bit": True}, marks=needs_bitsandbytes)])
def test_what_is_merged_computes_what_was_trained(folder, tmp_path, options, bits):
    """Merged into 4 bits, PEFT rounds the adapters away: the logits were off by as much as quantisation costs."""
    model = filled(load_trainable(settings(folder, **options, **bits)))
    expected = model(input_ids=IDS).logits
    untouched = model.base_model.model.model.embed_tokens.weight.clone()
    whole = merged(model)
    assert torch.allclose(whole(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    whole.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(again.eval()(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert again.dtype == torch.float32 and not hasattr(again.config, "quantization_config")
    assert torch.equal(again.get_input_embeddings().weight, untouched)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_peft": False}, r"model\.load_in_4bit needs model\.use_peft: true: weights of 4 bits do not train"),
        ({"dtype": "float64"}, r"bitsandbytes has no float64; set model\.dtype to float32 or bfloat16"),
        ({}, r"model\.load_in_4bit needs the package bitsandbytes: pip install 'radixtrain\[qlora\]'"),
    ],
)
def test_what_four_bits_need(tmp_path, without_bitsandbytes, changes, reason):
    """Before the weights are looked for."""
    with pytest.raises(UserError, match=reason):
        load_trainable(settings(tmp_path / "none", load_in_4bit=True, **changes))


def test_without_peft(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model\.use_peft needs the package peft: pip install"):
        load_trainable(settings(folder))


def test_a_checkpoint_of_other_quantised_weights(tiny_qwen3):
    model = tiny_qwen3()
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))
    with pytest.raises(UserError, match=r"is quantised \(gptq\), and adapters cannot be merged into such weights"):
        check_quantized(model, settings("m"))


@needs_bitsandbytes
def test_a_checkpoint_of_4_bits(folder, tmp_path):
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=four_bits)
    model.save_pretrained(tmp_path / "stored")
    with pytest.raises(UserError, match=r"is quantised, and weights of 4 bits do not train; set model\.use_peft: true"):
        load_trainable(settings(tmp_path / "stored", use_peft=False))
    adapted = filled(load_trainable(settings(tmp_path / "stored")))
    expected = adapted(input_ids=IDS).logits
    assert torch.allclose(merged(adapted)(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
