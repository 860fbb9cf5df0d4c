"""Weights of 4 bits: what bitsandbytes would do to gradients, and ordinary weights of the same values."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from radixtrain import verify_equivalence
from radixtrain.hf.quantized import four_bit_layers, keep_trainable, with_plain_weights
from radixtrain.testing import assert_within_reference_error
from radixtrain.verification.equivalence import TENSOR_FACTOR
from radixtrain.verification.oracle import float64_throughout
from tests.support import cases
from tests.support.models import tiny_qwen3

pytest.importorskip("bitsandbytes", reason="weights of 4 bits need bitsandbytes: pip install bitsandbytes")
peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, n, 5] for n in range(6, 12))]
IDS = torch.tensor([[1, 2, 3, 4, 5]])
VARIANTS = [{}, {"use_dora": True}, {"use_rslora": True}]
STORED = [(torch.float32, True, "nf4"), (torch.bfloat16, False, "fp4")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    tiny_qwen3(**sizes).save_pretrained(path)
    return path


@pytest.fixture
def load(folder):
    def run(dtype=torch.float32, double=False, kind="nf4"):
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=double,
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=four_bits)
        keep_trainable(model)
        return model

    return run


def adapted(model, **options):
    """With adapters that are not zero."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", **options)
    model = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def test_the_layers(load, tiny_qwen3):
    model = load()
    assert len(four_bit_layers(model)) == 2 * 7 and "lm_head" not in four_bit_layers(model)
    assert set(four_bit_layers(adapted(model))) == {
        f"base_model.model.{name}.base_layer" for name in four_bit_layers(load())
    }
    assert four_bit_layers(tiny_qwen3()) == {}


@pytest.mark.parametrize("options", cases(VARIANTS, quick=VARIANTS[:1]))
@pytest.mark.parametrize(("dtype", "double", "kind"), cases(STORED, quick=STORED[:1]))
def test_the_gradient_is_the_ordinary_one(load, options, dtype, double, kind):
    report = verify_equivalence(adapted(load(dtype, double, kind), **options), FEATURES)
    assert report.passed, report
    assert len(report.rungs) == (3 if dtype == torch.bfloat16 else 2)


@pytest.mark.parametrize("options", cases(VARIANTS, quick=VARIANTS[:1]))
def test_a_validation_does_not_change_the_gradient(load, options):
    model, found = adapted(load(), **options), []
    for is_validated in (False, True):
        if is_validated:
            with torch.no_grad():
                assert model.eval()(input_ids=IDS, labels=IDS).loss.isfinite()
        model.train().zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *found))


def test_plain_weights_for_good(load, tmp_path):
    model = load(double=True).eval()
    four_bits = model(input_ids=IDS).logits
    plain = with_plain_weights(model)(input_ids=IDS).logits
    with float64_throughout(model):
        truth = model(input_ids=IDS).logits
    assert_within_reference_error(plain, four_bits, truth, factor=TENSOR_FACTOR, names="logits")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert not hasattr(again.config, "quantization_config")
