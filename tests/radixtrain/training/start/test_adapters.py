"""LoRA, DoRA and 4-bit weights on a loaded model, what is refused by name, and what is written in the end."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from radixtrain.errors import UserError
from radixtrain.training.module import RadixModule
from radixtrain.training.start import loading
from radixtrain.training.start.loading import check_quantized, load_trainable, merged
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL
from tests.support.models import tiny_model, tiny_qwen3

pytest.importorskip("peft", reason="adapters need peft: pip install peft")
needs_bitsandbytes = pytest.mark.skipif(
    loading.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install bitsandbytes"
)
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def settings(path: Any, **changes: Any) -> Any:
    return RadixModule(str(path), **{"use_peft": True, "lora_r": 2, "lora_alpha": 4, **changes}).hparams


@pytest.fixture
def folder(tmp_path):
    tiny_qwen3(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@FULL
def test_all_linear_without_the_layer_that_peft_refuses(tmp_path):
    tiny_model("FalconH1ForCausalLM").save_pretrained(tmp_path)
    others = ["down_proj", "gate_proj", "in_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    for names, message in (
        ("all-linear", r"'out_proj' is incompatible with Mamba.*; its linear layers are down_proj, .*in_proj, "),
        (["in_prj"], r"no layer has a name of \['in_prj'\]; linear layers are down_proj, .*in_proj, "),
        (["q_proj", "in_prj"], r"no layer has the name 'in_prj', did you mean in_proj\?"),
    ):
        with pytest.raises(UserError, match=message):
            load_trainable(settings(tmp_path, lora_target_modules=names))
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"use_dora": True}, marks=FULL),
        {"use_rslora": True, "lora_target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_what_is_merged_computes_what_was_trained(folder, tmp_path, options):
    with float64_arithmetic():
        model = filled(load_trainable(settings(folder, dtype="float64", **options)))
        expected = model(input_ids=IDS).logits
        whole = merged(model)
        torch.testing.assert_close(whole(input_ids=IDS).logits, expected, rtol=1e-12, atol=1e-12)
        whole.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
        torch.testing.assert_close(again(input_ids=IDS).logits, expected, rtol=1e-12, atol=1e-12)


@FULL
@needs_bitsandbytes
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_what_is_merged_into_four_bits_computes_what_was_trained(folder, tmp_path, options):
    """PEFT rounds the adapters away, so the logits were off by as much as quantisation costs; now by a hundredth."""
    model = filled(load_trainable(settings(folder, load_in_4bit=True, **options)))
    expected, unquantised = model(input_ids=IDS).logits, filled(load_trainable(settings(folder, **options)))
    bar = (unquantised(input_ids=IDS).logits - expected).norm() / 100
    untouched = model.base_model.model.model.embed_tokens.weight.clone()
    whole = merged(model)
    assert (whole(input_ids=IDS).logits - expected).norm() < bar
    whole.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (again.eval()(input_ids=IDS).logits - expected).norm() < bar
    assert again.dtype == torch.float32 and not hasattr(again.config, "quantization_config")
    assert torch.equal(again.get_input_embeddings().weight, untouched)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_peft": False}, r"model\.load_in_4bit needs model\.use_peft: true: weights of 4 bits do not train"),
        ({"dtype": "float64"}, r"bitsandbytes has no float64; set model\.dtype to float32 or bfloat16"),
        ({}, r"model\.load_in_4bit needs the package bitsandbytes: pip install -U 'bitsandbytes>=0\.46\.1'$"),
    ],
)
def test_what_four_bits_need(tmp_path, monkeypatch, changes, reason):
    """Before the weights are looked for."""
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=reason):
        load_trainable(settings(tmp_path / "none", load_in_4bit=True, **changes))


def test_without_peft(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model\.use_peft needs the package peft: pip install -U 'peft>=0\.20'$"):
        load_trainable(settings(folder))


def test_a_checkpoint_of_other_quantised_weights(tiny_qwen3):
    model = tiny_qwen3()
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))
    with pytest.raises(UserError, match=r"is quantised \(gptq\), and adapters cannot be merged into such weights"):
        check_quantized(model, settings("m"))


@FULL
@needs_bitsandbytes
def test_a_checkpoint_of_4_bits(folder, tmp_path):
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=four_bits)
    model.save_pretrained(tmp_path / "stored")
    with pytest.raises(UserError, match=r"is quantised, and weights of 4 bits do not train; set model\.use_peft: true"):
        load_trainable(settings(tmp_path / "stored", use_peft=False))
    assert load_trainable(settings(tmp_path / "stored"))(input_ids=IDS).logits.isfinite().all()
