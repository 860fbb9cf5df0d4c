"""Shared prompts are stored once: bytes of keys and values beside those of transformers' `DynamicCache`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from radixtrain import RadixCache
from radixtrain.generation.prompt_cache import SPARE, PromptCache
from tests.claims.mistakes import plant
from tests.support.batches import GREEDY, WITH_LOGITS, batch_of, generated

SHARED, OWN, NEW, PROMPTS = 300, 4, 8, 16
CONFIG = {"vocab_size": 64, "max_position_embeddings": 800}
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}


def prompts_of(number: int) -> list[list[int]]:
    shared = [token % 40 for token in range(SHARED)]
    return [[*shared, 41 + place, 3, 4, 5] for place in range(number)]


def storages(*things: Any) -> dict[int, int]:
    """Bytes of the memory that tensors in these things hold, by its address."""
    held = [x.untyped_storage() for x in tree_leaves(things) if isinstance(x, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


def held_by(cache: PromptCache) -> dict[int, int]:
    """What a call holds: each row's own keys, shared ones, and what is left of the prompts where they were computed."""
    prompts = [node.rows.layers for path in cache._paths for node in path]
    return storages(cache.own, [[each.keys, each.values] for layer in cache._shared for each in layer], prompts)


def held(model: Any, prompts: list[list[int]]) -> dict[int, int]:
    """What is held when a call chooses its last token."""
    seen: list[dict[int, int]] = []

    def watched(real: Any, cache: PromptCache, *args: Any, **options: Any) -> Any:
        attended = real(cache, *args, **options)
        seen.append(held_by(cache))
        return attended

    with pytest.MonkeyPatch.context() as patch:
        plant(patch, PromptCache, "attend", watched)
        generated(model, prompts, **OPTIONS)
    return seen[-1]


def bytes_of_a_token(model: Any) -> int:
    config = model.config
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4  # type: ignore[no-any-return]


def test_a_shared_prompt_is_stored_once(
    tiny_qwen3: Callable[..., Any], print_after: Callable[[str, str], None]
) -> None:
    model = tiny_qwen3(**CONFIG).eval()
    expected = model.generate(**batch_of(prompts_of(PROMPTS)), **GREEDY, **WITH_LOGITS, **OPTIONS)
    layers = next(value for value in expected.values() if hasattr(value, "layers")).layers
    theirs = sum(each.nbytes for layer in layers for each in (layer.keys, layer.values))
    a_token = bytes_of_a_token(model)
    assert theirs == PROMPTS * (SHARED + OWN + NEW - 1) * a_token
    ours = sum(held(model, prompts_of(PROMPTS)).values())
    assert ours == (SHARED + PROMPTS * (OWN - 1 + SPARE)) * a_token, "columns of tails, and of answers"
    print_after(
        "generation: bytes of keys and values",
        f"{PROMPTS} prompts that share {SHARED} of {SHARED + OWN} tokens: {ours:,} in use, DynamicCache {theirs:,}",
    )


@pytest.mark.parametrize("budget", [150, None])
def test_what_a_cache_holds_after_a_call(tiny_qwen3: Callable[..., Any], budget: int | None) -> None:
    """Each token of the tree once, in memory of its own, and no more of them than the budget has room for."""
    model = tiny_qwen3(**CONFIG).eval()
    cache, prompts = RadixCache(budget), prompts_of(PROMPTS)
    found = generated(model, prompts, cache=cache, **OPTIONS).sequences
    assert cache.num_tokens == (budget or SHARED + PROMPTS * (OWN - 1))
    layers = [node.rows.layers for node in cache.nodes]
    assert sum(storages(layers).values()) == cache.num_tokens * bytes_of_a_token(model)
    assert torch.equal(generated(model, prompts, cache=cache, **OPTIONS).sequences, found)
    assert cache.counters.num_hits > 0


def test_a_cache_of_a_call_works_only_inside_of_it(tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3(**CONFIG).eval()
    found = generated(model, prompts_of(2), **OPTIONS)
    name, cache = next((name, value) for name, value in found.items() if isinstance(value, PromptCache))
    with pytest.raises(RuntimeError, match="works only inside of that call"):
        model(torch.tensor([[1], [2]]), **{name: cache})
