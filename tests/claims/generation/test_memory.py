"""Keys and values of a shared prompt exist once: slots in use and their bytes, beside Hugging Face's cache."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from radixtrain import RadixCache, generate

SHARED, OWN, NEW, PROMPTS = 256, 4, 8, 16
LANE = OWN + 512 // 16 + NEW  # slots: an allowance of an eighth of a kept run, in `longest_tail`


def prompts_of(num_prompts: int) -> list[list[int]]:
    """Prompts that share all tokens but the last four."""
    shared = [token % 30 for token in range(SHARED)]
    return [[*shared, 30 + place, 3, 2, 1] for place in range(num_prompts)]


def slots_in_use(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> tuple[int, RadixCache]:
    """The most slots that were in use after a token, lanes included, and the cache."""
    cache, used = RadixCache(), [0]

    def count(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        used[0] = max(used[0], cache.pool.capacity - cache.pool.num_free)
        return scores

    fixed = {"max_new_tokens": NEW, "eos_token_id": None, "cache": cache}
    generate(model, prompts, logits_processor=[count], **fixed, **options)
    return used[0], cache


def bytes_of_a_slot(cache: RadixCache) -> int:
    """What one token takes in all layers."""
    return sum(rows[0].nbytes for call in cache.store.calls for rows in call)


def bytes_of_hugging_face(model: Any, prompts: Sequence[Sequence[int]]) -> int:
    """What `generate` keeps for these prompts, of equal length, when the last token is chosen."""
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    result = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None, do_sample=False, return_dict_in_generate=True
    )
    layers = result.past_key_values.layers
    return sum(each.nbytes for layer in layers for each in (layer.keys, layer.values))


def test_a_shared_prompt_is_stored_once(
    tiny_qwen3: Callable[..., Any], print_after: Callable[[str, str], None]
) -> None:
    model, prompts = tiny_qwen3().eval(), prompts_of(PROMPTS)
    used, cache = slots_in_use(model, prompts, do_sample=False)
    theirs = bytes_of_hugging_face(model, prompts)
    length = SHARED + OWN + NEW - 1
    assert theirs == PROMPTS * length * bytes_of_a_slot(cache), "a slot is not a token's keys and values"
    assert SHARED + PROMPTS * (OWN + NEW - 1) <= used <= SHARED + PROMPTS * LANE
    assert cache.num_tokens == SHARED + PROMPTS * (OWN + NEW - 1), "answers are kept without copies"
    ours = used * bytes_of_a_slot(cache)
    assert theirs > 4 * ours
    print_after(
        "generation: bytes of keys and values",
        f"{PROMPTS} prompts that share {SHARED} of {SHARED + OWN} tokens: {ours:,} in use, DynamicCache {theirs:,}",
    )


@pytest.mark.parametrize("budget", [150, None])
def test_after_a_call_the_lanes_are_given_back(
    tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    """During it there are little more slots than the tree and lanes of the longest answer have."""
    monkeypatch.setattr(sys.modules["radixtrain.generation.generate"], "FIRST_ANSWER", 2)
    model, prompts, cache, seen = tiny_qwen3().eval(), prompts_of(PROMPTS), RadixCache(budget), list[int]()

    def count(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(cache.pool.capacity)
        return scores

    prompts = [ids[-OWN - 3 :] for ids in prompts]
    fixed: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    found = generate(model, prompts, cache=cache, logits_processor=[count], **fixed)
    assert {len(row) for call in cache.store.calls for row in call} == {cache.pool.capacity}
    assert cache.pool.capacity <= (budget or 2 * cache.num_tokens)
    lanes = PROMPTS * (60 + OWN + 3)
    assert max(seen) <= 1.3 * lanes + (budget or cache.num_tokens)
    again = generate(model, prompts, cache=cache, **fixed)
    assert again.token_ids == found.token_ids == generate(model, prompts, **fixed).token_ids
    assert again.stats.num_cached_tokens > 0
    cache.clear()
    assert cache.pool.capacity == 0 and not cache.store.calls


def test_its_rows_exist_once(tiny_qwen3: Callable[..., Any]) -> None:
    """Keys of a shared token are nowhere else in the store, not in a lane either: no two tokens have equal keys.

    Those of one row in two places would be a copy, or computed twice and a rounding apart; those of others are of order
    one, and none of them is as close as 1e-4.
    """
    model, prompts = tiny_qwen3().eval(), prompts_of(PROMPTS)
    _, cache = slots_in_use(model, prompts, do_sample=False)
    slots = cache.match_prefix(prompts[0][:SHARED]).slots
    for key, value in cache.store.calls:
        for place in (1, SHARED // 2, SHARED - 1):
            row = int(slots[place])
            same = (key - key[row]).abs().amax((1, 2)) + (value - value[row]).abs().amax((1, 2)) < 1e-4
            assert same.nonzero().flatten().tolist() == [row]


def test_samples_of_one_prompt(tiny_qwen3: Callable[..., Any]) -> None:
    """Thirty-two samples take one prompt and what they generate."""
    used, cache = slots_in_use(tiny_qwen3().eval(), prompts_of(1), do_sample=True, num_return_sequences=32, seed=0)
    assert used <= SHARED + OWN + 32 * LANE
    assert cache.num_tokens <= SHARED + OWN + 32 * (NEW - 1)


def test_later_prompts_evict_earlier_ones(tiny_qwen3: Callable[..., Any]) -> None:
    """Without a cache of the user's nothing stays that the next prompts do not begin with."""
    seen = []
    groups = [[(7 * group + token) % 40 for token in range(SHARED)] for group in range(6)]
    prompts = [[*group, place, 41, 42, 43] for group in groups for place in range(4)]

    class Watched(RadixCache):
        def reserve(self, count: int, contiguous: bool = False) -> Any:
            slots = super().reserve(count, contiguous)
            seen.append(self.pool.capacity - self.pool.num_free)
            return slots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["radixtrain.generation.prefill"], "RadixCache", Watched)
        generate(tiny_qwen3().eval(), prompts, max_new_tokens=NEW, batch_size=4, eos_token_id=None, do_sample=False)
    assert max(seen) <= 2 * SHARED + 4 * LANE, seen
