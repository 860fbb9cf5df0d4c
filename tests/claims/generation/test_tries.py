"""Over generated tries the answers are those of the ordinary model, however they are computed.

Prompts are nested, equal, prefixes of each other, single tokens and combs; they come once or in several calls on one
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


def combs() -> st.SearchStrategy[list[list[int]]]:
    """A long prompt, and branches at several of its tokens."""

    def comb(back: list[int], places: list[int], tooth: list[int]) -> list[list[int]]:
        return [[*back[: place % len(back) + 1], *tooth] for place in places]

    tokens = st.integers(0, 7)
    return st.builds(
        comb,
        st.lists(tokens, min_size=6, max_size=14),
        st.lists(st.integers(0, 13), min_size=2, max_size=6),
        st.lists(tokens, max_size=3),
    )


PROMPTS = st.one_of(ragged_batches(max_sequences=7), ragged_batches(vocab_size=2, max_sequences=6), combs())
PIECES = st.tuples(st.sampled_from([1, 4, 16, 512]), st.sampled_from([8, 100]))
OPTIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 6),
        "num_return_sequences": st.sampled_from([1, 3]),  # one is greedy
    }
)


@pytest.mark.parametrize("name", cases(MODELS, ["gpt-oss"]))
def test_generated_tries(name: str, print_after: Callable[[str, str], None]) -> None:
    model = next(family for family in CORE if family.name == name).build().eval()
    worst, seen = [0.0], {"tries": 0, "found in the cache": 0, "evictions": 0}

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        prompts=PROMPTS,
        pieces=PIECES,
        options=OPTIONS,
        more=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        budget=st.sampled_from(["none", None, 1, 4, 16]),
    )
    def one_try(prompts: Any, pieces: Any, options: dict[str, Any], more: list[int], budget: Any) -> None:
        cache = None if budget == "none" else RadixCache(budget)
        number = options["num_return_sequences"]
        how = {**options, "do_sample": number > 1, "eos_token_id": None}
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


def test_nan_stays_in_its_sequence(tiny_qwen3: Callable[..., Any]) -> None:
    """A token without finite keys reaches those who read it, and nobody beside it."""
    model = tiny_qwen3(tie_word_embeddings=False).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[49] = torch.nan
    prompts = [[7, 8, 9, 2], [7, 8, 49, 3], [7, 8, 49], [7, 9, 1], [7, 9], [9, 9], [9, 9, 9, 9]]
    finite = [place for place, prompt in enumerate(prompts) if 49 not in prompt]
    with float64_throughout(model):
        for cells in (1, 512):
            with with_pieces_of(cells):
                found = generated(model, prompts, cache=RadixCache(), max_new_tokens=5, eos_token_id=None)
            chosen = type(found)(sequences=found.sequences[finite], logits=tuple(x[finite] for x in found.logits))
            answers = chosen.sequences[:, 4:].tolist()
            for row, (place, answer) in enumerate(zip(finite, answers, strict=True)):
                truth = logits_by_the_model(model, prompts[place] + answer)[len(prompts[place]) - 1 : -1]
                assert (torch.stack([step[row] for step in chosen.logits]) - truth).abs().max() <= BAR, prompts[place]
            others = [place for place in range(len(prompts)) if place not in finite]
            assert all(step[others].isnan().all() for step in found.logits)
