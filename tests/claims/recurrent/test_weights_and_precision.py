"""Gradients of hybrids with frozen weights, with adapters and below float64."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixtrain import share_prefixes
from radixtrain.verification.equivalence import TENSOR_FACTOR, compare_gradients
from radixtrain.verification.oracle import (
    float64_throughout,
    float64_truth,
    gradients_of,
    ordinary_padded,
    radix_batch,
)
from tests.support import FULL
from tests.support.models import tiny_hybrid
from tests.support.steps import BAR, FEATURES, KINDS, ONE_KIND, assert_exact, batch_of, mixers_in


@ONE_KIND
@pytest.mark.parametrize(
    "frozen",
    [r"embed_tokens|lm_head", r"layers\.0\.(linear_attn|mamba|conv)\.", r"layers\.1\.", r"^(?!.*layers\.0\.)"],
    ids=["embeddings", "mixers", "attention", "all but the mixer's layer"],
)
def test_frozen(kind: str, frozen: str) -> None:
    """Weights without gradients, whose rows and states may have none either."""
    model = tiny_hybrid(kind, tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    truth = float64_truth(model, FEATURES)
    assert 0 < len(truth.tensors) < len(list(model.parameters()))
    assert_exact(share_prefixes(model), truth)


@FULL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("use_dora", "prepared", "checkpointing"),
    [(False, "before", True), (False, "after", False), (True, "after", True)],
)
def test_adapters(kind: str, use_dora: bool, prepared: str, checkpointing: bool) -> None:
    """LoRA and DoRA on what a mixer projects, put on before or after `share_prefixes`."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear", use_dora=use_dora, init_lora_weights=False)

    def build(prepare: str | None) -> Any:
        torch.manual_seed(0)
        model = tiny_hybrid(kind)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model = get_peft_model(share_prefixes(model) if prepare == "before" else model, config)
        return share_prefixes(model) if prepare == "after" else model

    truth = float64_truth(build(None), FEATURES)
    model = build(prepared)
    assert len(mixers_in(model)) == 1
    assert_exact(model, truth)


@FULL
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    """About as far from the truth as an ordinary batch in the same precision.

    Both compute the states in different calls, so each error is a sample of the rounding; TENSOR_FACTOR is for luck,
    and that of a rung that is not judged.
    """
    stock, model = tiny_hybrid(kind), share_prefixes(tiny_hybrid(kind))
    truth = float64_truth(stock, FEATURES)
    with torch.autocast("cpu", torch.bfloat16):
        ordinary = gradients_of(stock, lambda: ordinary_padded(stock, FEATURES))
        found = gradients_of(model, lambda: radix_batch(model, batch_of()))
    rung = compare_gradients("bfloat16", truth, ordinary, found, judged=False)
    assert rung.passed and rung.worst.radix <= TENSOR_FACTOR * rung.errors("ordinary")[-1], rung.worst


@ONE_KIND
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind: str, without: Callable[[], Any]) -> None:
    """The first batch of a model may be one of an evaluation; the values are those with gradients."""
    model = share_prefixes(tiny_hybrid(kind))
    with float64_throughout(model):
        with without():
            found = model.eval()(**batch_of()).logits
        assert not found.requires_grad
        output = model.train()(**batch_of())
        assert (found - output.logits).norm() <= BAR * output.logits.norm()
        output.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
