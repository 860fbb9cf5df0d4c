"""Which heads are one matrix product, and the rows that the loss starts from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from tests.support.models import DECODER, tiny_model, with_adapters

PLAIN = "is one matrix product: head and loss are fused"
MORE = "does more than one matrix product: its own head is used"
FURTHER = "has parameters besides its last matrix"
HEADS: dict[str, tuple[str, dict[str, Any], str]] = {  # the class, its settings, what the log says
    "Llama": ("LlamaForCausalLM", {}, PLAIN),
    "Qwen3, tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}, PLAIN),
    "Gemma 3": ("Gemma3ForCausalLM", {}, PLAIN),
    "OPT, another width": ("OPTForCausalLM", {"word_embed_proj_dim": 16}, PLAIN),
    "Phi, with a bias": ("PhiForCausalLM", {}, PLAIN),
    "Granite, unscaled": ("GraniteForCausalLM", {}, PLAIN),
    "Mixtral": ("MixtralForCausalLM", {}, PLAIN),
    "ModernBERT-decoder": ("ModernBertDecoderForCausalLM", {}, FURTHER),
    "BERT": ("BertLMHeadModel", DECODER, FURTHER),
    "RoBERTa": ("RobertaForCausalLM", {**DECODER, "pad_token_id": 0}, FURTHER),
    "ELECTRA, another width": ("ElectraForCausalLM", {**DECODER, "embedding_size": 16}, FURTHER),
    "Gemma 2, soft-cap": ("Gemma2ForCausalLM", {}, MORE),
    "Granite, scaled": ("GraniteForCausalLM", {"logits_scaling": 2.0}, MORE),
    "Cohere 2, scaled": ("Cohere2ForCausalLM", {}, MORE),
    "RecurrentGemma, soft-cap by another name": ("RecurrentGemmaForCausalLM", {}, MORE),
}


def build(name: str) -> Any:
    model_class, settings, _ = HEADS[name]
    return tiny_model(model_class, **settings).eval()


@pytest.mark.parametrize("name", HEADS)
def test_one_matrix_or_more(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log says which, and why."""
    model, (model_class, _, said) = build(name), HEADS[name]
    for dtype in (torch.float32, torch.bfloat16):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="radixtrain"):
            assert has_plain_head(model.to(dtype)) is (said == PLAIN)
        (record,) = caplog.records
        assert record.getMessage().startswith(f"the head of {model_class} {said}")


def tanh_first(model: Any) -> None:
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden.tanh(), model.lm_head.weight)


def quantized(model: Any) -> None:
    model.lm_head.__class__ = type("Quantized", (nn.Linear,), {})


def narrow(model: Any) -> None:
    """It reads a part of the hidden row."""
    model.lm_head = nn.Linear(16, 64)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0][..., :16],))


def with_forward(model: Any, forward: Callable[..., Any]) -> Any:
    model.__class__ = type("Odd", (type(model),), {"forward": forward})
    return model


def of_logits(change: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    """A forward whose logits are changed."""

    def forward(self: Any, input_ids: Tensor) -> Any:
        output = super(type(self), self).forward(input_ids)
        return type(output)(logits=change(self, output.logits))

    return forward


def add_a_zero(model: Any) -> None:
    """A bias that will not stay zero."""
    model.extra = nn.Parameter(torch.zeros(64))
    with_forward(model, of_logits(lambda model, logits: logits + model.extra))


CHANGES_OF_LOGITS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scaled": lambda model, logits: logits * 1.01,
    "capped": lambda model, logits: 1024 * torch.tanh(logits / 1024),  # a power of two changes no bit of a small logit
    "conditional": lambda model, logits: torch.where(logits.abs() > 50, logits / 2, logits),
    "a constant": lambda model, logits: logits + 1e-3,
}
CHANGES: dict[str, Callable[[Any], object]] = {
    **{name: partial(with_forward, forward=of_logits(change)) for name, change in CHANGES_OF_LOGITS.items()},
    "a bias": add_a_zero,
    "a hook on the head": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
    "a backward hook on the head": lambda model: model.lm_head.register_full_backward_hook(lambda *_: None),
    "a hook on the model": lambda model: model.register_forward_hook(lambda *_: None),
    "another forward": tanh_first,
    "another class": quantized,
    "another width": narrow,
    "an adapter": lambda model: with_adapters(model, target_modules=["lm_head"]),
    "a copy by PEFT": lambda model: with_adapters(model, target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_to_a_plain_head_is_seen(name: str, dtype: torch.dtype) -> None:
    """With the fused loss each would train wrong."""
    model = build("Llama").to(dtype)
    CHANGES[name](model)
    assert not has_plain_head(model)


def test_an_adapter_elsewhere() -> None:
    assert has_plain_head(with_adapters(build("Llama"), target_modules=["q_proj"]))


def of_images(self: Any, input_ids: Tensor, images: Tensor) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (of_images, r"^Odd computes no logits from input_ids only \(TypeError: .*'images'"),
        (of_logits(lambda model, logits: logits[:, -1:]), r"makes logits \[1, 1, 64\] of 3 hidden rows"),
        (of_logits(lambda model, logits: logits.cumsum(1)), "gives a hidden row other logits if other rows are next"),
    ],
)
def test_refused(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        has_plain_head(with_forward(build("Llama"), forward))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_model_is_left_as_it_was(mode: Any) -> None:
    """And none of its layers runs."""
    model, ran = share_prefixes(build("Llama").train()), []
    model.model.norm.eval()
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    with mode():
        assert has_plain_head(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert "forward" not in vars(model.model)
    assert not ran and all(parameter.grad is None for parameter in model.parameters())
