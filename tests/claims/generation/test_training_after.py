"""Generation between training steps, in float64: it never meets keys of other weights, and leaves all as it was.

Weights change between two calls on one cache. Afterwards attention, hooks, modes, gradients and random states are
compared with those before, also if the call failed, and a training step after it is bit-equal to one without it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from radixtrain import RadixCache, RadixCollator, generate, share_prefixes
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import cases
from tests.support.batches import batch_of

PROMPTS = [[7, 8, 9, 10, 11, 1, 2], [7, 8, 9, 10, 11, 3], [30, 31, 32, 33]]
BATCH: dict[str, Any] = batch_of(PROMPTS)
OPTIONS: dict[str, Any] = {**BATCH, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
EXACT = 1e-12


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_arithmetic():
        yield


def with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False, **options)
    )


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([PROMPTS[0]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_changed_weights(tiny_qwen3: Callable[..., Any]) -> None:
    """What a cache gives afterwards is what no cache gives. Other changes: tests/radixtrain/generation."""
    model, cache = share_prefixes(tiny_qwen3()).double(), RadixCache()
    generate(model, cache=cache, **OPTIONS)
    generate(model, cache=cache, **OPTIONS)
    hits = cache.counters.num_hits
    assert hits == sum(len(prompt) - 1 for prompt in PROMPTS), "nothing changed, nothing found"
    train_a_step(model)
    found, fresh = (generate(model, cache=each, **OPTIONS, **LOGITS) for each in (cache, None))
    assert torch.equal(found.sequences, fresh.sequences)
    worst = max((one - other).abs().max().item() for one, other in zip(found.logits, fresh.logits, strict=True))
    assert worst <= EXACT and cache.counters.num_hits - hits < hits, "old keys were met"


def trained_by(kind: str, tiny_qwen3: Callable[..., Any]) -> Any:
    """A model in training mode, as one of its ways to train leaves it."""
    model = tiny_qwen3().double().train()
    if kind == "shared":
        return share_prefixes(model, min_ratio=0.0)
    if kind == "PEFT":
        return with_lora(model, lora_dropout=0.2).train()
    if kind == "PEFT, prepared":
        return share_prefixes(with_lora(model)).train()
    return model


KINDS = ["plain", "shared", "PEFT", "PEFT, prepared"]


@contextmanager
def isolated_generators() -> Iterator[None]:
    """A program that draws answers between steps keeps the generators of training apart."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def batch_for(kind: str) -> dict[str, Any]:
    if "prepared" in kind:
        return RadixCollator()([{"input_ids": ids, "labels": ids} for ids in PROMPTS])
    is_first = BATCH["attention_mask"].cumsum(1) <= 1  # predicted from padding
    return {**BATCH, "labels": BATCH["input_ids"].masked_fill(is_first, -100)}


def state_of(model: Any) -> dict[str, Any]:
    """All that generation could leave changed, apart from weights."""
    modules = dict(model.named_modules())
    hooks = {
        f"{name}: {kind}": list(getattr(module, kind).items())
        for name, module in modules.items()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    }
    configs = {name: getattr(module, "config", None) for name, module in modules.items()}
    return {
        "hooks": hooks,
        "forward": {name: module.__dict__.get("forward") for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "attention": {name: getattr(config, "_attn_implementation", None) for name, config in configs.items()},
        "use_cache": {name: getattr(config, "use_cache", None) for name, config in configs.items()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": torch.is_grad_enabled(),
        "generation_config": model.generation_config.to_dict(),
    }


def random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is the global state that must not move
    return [torch.get_rng_state().tolist(), keys.tolist(), rest, kind, random.getstate()]


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("kind", cases(KINDS, ["shared", "PEFT"]))
def test_all_is_restored(tiny_qwen3: Callable[..., Any], kind: str) -> None:
    """After greedy decoding, and after an error in a processor or in a layer; with modes that differ."""
    model = trained_by(kind, tiny_qwen3)
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    layer.eval()
    before, drawn, cache = state_of(model), random_state(), RadixCache()
    generate(model, **OPTIONS)
    assert state_of(model) == before and random_state() == drawn
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache=cache, logits_processor=[interrupted], **OPTIONS)
    assert state_of(model) == before and random_state() == drawn
    handle = layer.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache=RadixCache(), **OPTIONS)
    handle.remove()
    assert state_of(model) == before and random_state() == drawn


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", cases(KINDS, ["PEFT, prepared"]))
def test_a_step_is_bit_equal(tiny_qwen3: Callable[..., Any], kind: str) -> None:
    """With dropout in the adapters of one of them, so that the random state counts."""
    with_answers, without = (trained_by(kind, tiny_qwen3) for _ in range(2))
    without.load_state_dict(with_answers.state_dict())
    results = []
    for model in (with_answers, without):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            if model is with_answers:
                with isolated_generators():
                    generate(model, cache=RadixCache(), **{**OPTIONS, "do_sample": True})
            loss = model(**batch_for(kind)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *results))  # the same operations in the same order
    assert not torch.equal(results[0][0], results[0][2]), "nothing was trained"
