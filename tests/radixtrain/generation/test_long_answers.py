"""Answers that are longer than a lane was made for."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from radixtrain import RadixCache, generate
from radixtrain.generation import active
from radixtrain.generation import generate as module


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,
    )
    return Qwen3ForCausalLM(config).double().eval()


PROMPTS = [[7, 8, 9, 10, place] for place in range(1, 6)] + [[3], [3, 4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_lanes_grow(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch, batch_size: int | None, cached: bool
) -> None:
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 5, "batch_size": batch_size}
    enough = generate(model, PROMPTS, **options)
    assert max(map(len, enough.token_ids)) == 40
    monkeypatch.setattr(module, "FIRST_ANSWER", 2)
    lengthened = []
    lengthen = active.Active._lengthen

    def counted(self: active.Active) -> None:
        lengthened.append(self.lanes.step)
        lengthen(self)

    monkeypatch.setattr(active.Active, "_lengthen", counted)
    cache = RadixCache() if cached else None
    grown = generate(model, PROMPTS, cache=cache, **options)
    assert grown.token_ids == enough.token_ids
    for one, other in zip(grown.logprobs, enough.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)  # a norm of Hugging Face's computes in float32
    assert len(lengthened) > 2
    assert sorted(lengthened) == lengthened
    if cache is not None:
        assert cache.root.locks == cache.num_reserved == 0
        assert cache.pool.capacity - cache.pool.num_free == cache.num_tokens


def test_nothing_is_lost_if_there_is_no_memory(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_ANSWER", 2)
    cache = RadixCache()
    generate(model, PROMPTS, max_new_tokens=2, do_sample=False, cache=cache)
    store = type(cache.store)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store, "copy", full)
        with pytest.raises(MemoryError):
            generate(model, PROMPTS, max_new_tokens=20, do_sample=False, eos_token_id=None, cache=cache)
    assert cache.root.locks == cache.num_reserved == 0
    assert cache.pool.capacity - cache.pool.num_free == cache.num_tokens


def test_a_generous_limit_costs_nothing_beforehand(model: Qwen3ForCausalLM) -> None:
    cache = RadixCache()
    options = {"do_sample": True, "seed": 1, "eos_token_id": list(range(1, 64, 2)), "cache": cache}
    found = generate(model, [[3, 5]] * 64, max_new_tokens=10**8, **options)
    assert set(found.finish_reasons) == {"stop"}
    assert cache.pool.capacity < 65_536
