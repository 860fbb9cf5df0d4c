"""`verify_equivalence`: its rungs, and the model afterwards. What it proves is in tests/claims/equivalence."""

from typing import Any

import peft
import pytest
import torch

from radixtrain import RadixCollator, share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.share import options_of
from radixtrain.verification.equivalence import verify_arms
from radixtrain.verification.oracle import ordinary_one_by_one
from tests.support.batches import FEATURES
from tests.support.models import tiny_model, tiny_qwen3


class TestTheRungs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_one_is_in_the_training_dtype(self, dtype: torch.dtype) -> None:
        report = verify_equivalence(tiny_qwen3().to(dtype), FEATURES)
        rungs = dict.fromkeys([torch.float64, torch.float32, dtype])
        assert [f"torch.{made.precision}" for made in report.rungs] == list(map(str, rungs))
        assert report.passed, str(report)


class TestTheModel:
    def test_comes_back_as_it_was(self) -> None:
        model = tiny_qwen3().bfloat16().train()
        model.model.layers[0].eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        verify_equivalence(model, FEATURES)
        assert model.config._attn_implementation == "sdpa"
        assert [layer.training for layer in model.model.layers] == [False, True]
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_stays_prepared(self) -> None:
        model = share_prefixes(tiny_qwen3(), attention="path")
        assert verify_equivalence(model, FEATURES, attention="cascade").passed
        assert options_of(model)["attention"] == "path"
        assert torch.isfinite(model(**RadixCollator()(FEATURES)).loss)

    @pytest.mark.usefixtures("hooks_that_may_stay")
    def test_buffers_that_a_forward_pass_replaces_come_back(self) -> None:
        model = tiny_qwen3()
        rotary = model.model.rotary_emb
        before, forward = rotary.inv_freq, rotary.forward

        def replacing(*args: Any, **options: Any) -> Any:
            rotary.register_buffer("inv_freq", rotary.inv_freq * 1.0, persistent=False)
            return forward(*args, **options)

        rotary.forward = replacing
        verify_equivalence(model, FEATURES)
        assert rotary.inv_freq is before and before.dtype == torch.float32

    @pytest.mark.usefixtures("hooks_that_may_stay")
    def test_dropout_that_was_allowed_is_off_meanwhile(self) -> None:
        """And the model in training mode: evaluation would turn off activation checkpointing, which is compared too."""
        config = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
        model = peft.get_peft_model(tiny_qwen3(), config).train()
        modes = []
        model.base_model.model.model.layers[0].register_forward_pre_hook(
            lambda module, _: modes.append(module.training)
        )
        share_prefixes(model, allow_dropout=["lora_dropout"])
        report = verify_equivalence(model, FEATURES)
        assert report.passed, str(report)
        assert model.training and set(modes) == {True}
        assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}

    def test_a_fresh_lora_is_filled_meanwhile(self) -> None:
        """Its B starts at zero, so that the gradient of A would be zero in both arms."""
        model = peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(target_modules="all-linear"))
        report = verify_equivalence(model, FEATURES)
        assert report.passed and report.conclusive, str(report)
        assert not any(tensor.any() for name, tensor in model.named_parameters() if "lora_B" in name)


def test_a_mixture_of_experts() -> None:
    """A token that is nearly tied goes to another expert in 16 bits, and no bar for rounding holds."""
    model = tiny_model("Qwen3MoeForCausalLM", output_router_logits=True).bfloat16()
    report = verify_equivalence(model, FEATURES)
    assert [made.judged for made in report.rungs] == [True, True, False]
    assert report.passed, str(report)
    assert "bfloat16: not judged: rounding to 16 bits moves tokens between experts" in str(report)
    assert model.config.output_router_logits is True, "the router loss is off only meanwhile"


def test_under_autocast() -> None:
    """Mixed precision is a rung of its own, on float32 weights."""
    model = tiny_qwen3()
    batch = RadixCollator()(FEATURES)
    report = verify_arms(
        model,
        FEATURES,
        ordinary=lambda: ordinary_one_by_one(model, FEATURES),
        radix=lambda: iter([model(**batch).loss]),
        autocast=torch.bfloat16,
    )
    assert [made.precision for made in report.rungs] == ["float64", "float32", "bfloat16"]
    assert report["bfloat16"].worst.radix > 1e-4, "the rung was not run in 16 bits"
    assert report.passed, str(report)


def test_what_cannot_be_compared_is_refused() -> None:
    model = tiny_qwen3()
    with pytest.raises(ValueError, match="no token of these features bears loss"):
        verify_equivalence(model, [{"input_ids": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        verify_equivalence(tiny_qwen3().requires_grad_(False), FEATURES)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match=r"the ordinary model's gradient of .* is not finite"):
        verify_equivalence(model, FEATURES)
