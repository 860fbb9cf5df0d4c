"""Over generated tries the answers are those of the ordinary model, however they are computed.

Prompts are nested, equal, prefixes of each other, single tokens; they come once or in several calls on one
cache, whose budget may be so small that it evicts all the time. The oracle is an ordinary forward pass over every text,
in float64: the logits of each token are within 1e-10 of it. `make test` draws 10 tries of one model, `make test-full`
50 of each.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixtrain import RadixCache
from radixtrain.testing import ragged_batches
from radixtrain.verification.oracle import float64_throughout
from tests.support import TRIES, cases
from tests.support.batches import answers_of, generated, logits_by_the_model, with_pieces_of
from tests.support.models import CORE

BAR = 1e-10
MODELS = ["Qwen3", "Gemma 2", "gpt-oss", "DeepSeek-V3"]  # plain; windows and a soft-cap; windows and sinks; latent


PROMPTS = st.one_of(ragged_batches(max_sequences=7), ragged_batches(vocab_size=2, max_sequences=6))
PIECES = st.tuples(st.sampled_from([1, 4, 16, 512]), st.sampled_from([8, 100]))


@pytest.mark.parametrize("name", cases(MODELS, ["gpt-oss"]))
def test_generated_tries(name: str, print_after: Callable[[str, str], None]) -> None:
    model = next(family for family in CORE if family.name == name).build().eval()
    worst, seen = [0.0], {"tries": 0, "found in the cache": 0, "evictions": 0}

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        prompts=PROMPTS,
        pieces=PIECES,
        number=st.sampled_from([1, 3]),  # one is greedy
        max_new_tokens=st.integers(1, 6),
        more=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        budget=st.sampled_from(["none", None, 1, 4, 16]),
    )
    def one_try(prompts: Any, pieces: Any, number: int, more: list[int], budget: Any, **how: Any) -> None:
        cache = None if budget == "none" else RadixCache(budget)
        how |= {"num_return_sequences": number, "do_sample": number > 1, "eos_token_id": None}
        for _ in range(1 if cache is None else 2):
            with with_pieces_of(*pieces):
                found = generated(model, prompts, cache=cache, **how)
            worst[0] = max(worst[0], error_of(model, prompts, found, number))
            answers = answers_of(found.sequences, prompts)[::number]
            prompts = [*([*prompt, *each, *more] for prompt, each in zip(prompts, answers, strict=True)), *prompts[:2]]
        seen["tries"] += 1
        if cache is not None:
            seen["found in the cache"] += cache.counters.num_hits
            seen["evictions"] += cache.counters.num_evicted
            assert budget is None or cache.num_tokens <= budget

    with float64_throughout(model):
        one_try()
    assert worst[0] <= BAR and all(seen.values()), f"the tries prove nothing of what is 0 here: {seen}"
    print_after("generation: tries", f"{name}: worst logit {worst[0]:.1e}, {seen}")


def error_of(model: Any, prompts: list[list[int]], found: Any, number: int) -> float:
    """The largest difference of a logit from an ordinary forward pass. number: of answers to each prompt."""
    errors = []
    for row, answer in enumerate(answers_of(found.sequences, prompts)):
        prompt = prompts[row // number]
        truth = logits_by_the_model(model, prompt + answer)[len(prompt) - 1 : -1]
        errors.append((torch.stack([step[row] for step in found.logits]) - truth).abs().max().item())
    return max(errors)
