"""Generation between training steps, in float64: it never meets keys of other weights, and leaves all as it was.

Weights change between two calls on one cache. Afterwards attention, hooks, modes, gradients and random states are
compared with those before, also if the call failed, and the training steps after it are bit-equal to those without it.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from radixtrain import RadixCache, RadixCollator, share_prefixes
from radixtrain.verification.oracle import float64_arithmetic
from tests.claims.mistakes import state_of
from tests.support import cases
from tests.support.batches import batch_of, generated

PROMPTS = [[7, 8, 9, 10, 11, 1, 2], [7, 8, 9, 10, 11, 3], [30, 31, 32, 33]]
BATCH: dict[str, Any] = batch_of(PROMPTS)
answers = partial(generated, prompts=PROMPTS, max_new_tokens=4, eos_token_id=None)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_arithmetic():
        yield


def with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False, **options)
    )


def test_changed_weights(tiny_qwen3: Callable[..., Any]) -> None:
    """What a cache gives afterwards is what no cache gives. Other changes: tests/radixtrain/generation."""
    model, cache = share_prefixes(tiny_qwen3()).double(), RadixCache()
    answers(model, cache=cache)
    answers(model, cache=cache)
    hits = cache.counters.num_hits
    assert hits == sum(len(prompt) - 1 for prompt in PROMPTS), "nothing changed, nothing found"
    steps_of(model, "shared")
    found, fresh = (answers(model, cache=each) for each in (cache, None))
    assert torch.equal(found.sequences, fresh.sequences)
    torch.testing.assert_close(found.logits, fresh.logits, rtol=0, atol=1e-12)
    assert cache.counters.num_hits - hits < hits, "old keys were met"


def trained_by(kind: str, tiny_qwen3: Callable[..., Any]) -> Any:
    """A model in training mode but for one module, as one of its ways to train leaves it."""
    base = tiny_qwen3().double()
    model = with_lora(base, lora_dropout=0.0 if "prepared" in kind else 0.2) if "PEFT" in kind else base
    if kind in ("shared", "PEFT, prepared"):
        share_prefixes(model, min_ratio=0.0)
    model.train()
    base.model.layers[1].mlp.eval()
    return model


KINDS = ["plain", "shared", "PEFT", "PEFT, prepared"]


def batch_for(kind: str) -> dict[str, Any]:
    if "prepared" in kind:
        return RadixCollator()([{"input_ids": ids, "labels": ids} for ids in PROMPTS])
    is_first = BATCH["attention_mask"].cumsum(1) <= 1  # predicted from padding
    return {**BATCH, "labels": BATCH["input_ids"].masked_fill(is_first, -100)}


def random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is the global state that must not move
    return [torch.get_rng_state().tolist(), keys.tolist(), rest, kind, random.getstate()]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def steps_of(model: Any, kind: str) -> list[torch.Tensor]:
    """The losses of two training steps, and the weights after them."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(**batch_for(kind)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert not torch.equal(*losses), "nothing was trained"
    return [*losses, *model.state_dict().values()]


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("kind", cases(KINDS, ["shared", "PEFT", "PEFT, prepared"]))
def test_all_is_restored(tiny_qwen3: Callable[..., Any], kind: str) -> None:
    """After greedy decoding, and after an error in a processor or in a layer; with modes that differ.

    With dropout in the adapters of one of them, so that the random state counts.
    """
    model, without = (trained_by(kind, tiny_qwen3) for _ in range(2))
    without.load_state_dict(model.state_dict())
    before = state_of(model), random_state()
    answers(model)
    assert (state_of(model), random_state()) == before
    with pytest.raises(KeyboardInterrupt):
        answers(model, cache=RadixCache(), logits_processor=[interrupted])
    assert (state_of(model), random_state()) == before
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    handle = layer.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(model, cache=RadixCache())
    handle.remove()
    assert (state_of(model), random_state()) == before
    assert all(map(torch.equal, steps_of(model, kind), steps_of(without, kind)))
