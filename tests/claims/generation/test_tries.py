"""Over generated tries the answers are those of the ordinary model, however they are computed.

Prompts are nested, equal, prefixes of each other, single tokens and combs; they come in any batch size, once or in
several calls on one cache, whose budget may be so small that it evicts all the time. The oracle is an ordinary forward
pass over every finished text, in float64: a greedy token is the best of its logits, a sampled one is where the
cumulative probability passes the draw, and log-probabilities are equal within 1e-10. `make test` draws 10 tries of one
model, `make test-full` 50 of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from answers import finished_logits, is_idle, texts_of, with_pieces_of
from families import CORE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import TRIES, cases

from radixtrain import RadixCache, generate
from radixtrain.generation.cache import CacheFull
from radixtrain.generation.generate import Generated
from radixtrain.generation.sampling import TokenChooser
from radixtrain.testing import ragged_batches
from radixtrain.verification.oracle import float64_throughout

BAR = 1e-10
ENDS = list(range(20, 50, 4))  # of the 50 or 64 tokens of the vocabulary, so that answers have many lengths
MODELS = ["Qwen3", "Gemma 2", "gpt-oss", "DeepSeek-V3"]  # plain; windows and a soft-cap; windows and sinks; latent
SEED = 3


@dataclass(frozen=True)
class Way:
    """How some prompts are answered.

    pieces: arguments of `with_pieces_of`. num_return_sequences: None is greedy decoding.
    keeps_answers: whether there is a cache.
    spare: tokens that it may hold beyond the longest prompt; None for no budget.
    """

    pieces: tuple[int, int, bool]
    kernel: str
    batch_size: int | None
    max_new_tokens: int
    num_return_sequences: int | None
    keeps_answers: bool
    spare: int | None

    def options(self) -> dict[str, Any]:
        sampled = {"do_sample": True, "num_return_sequences": self.num_return_sequences, "top_k": 0, "seed": SEED}
        how = {"do_sample": False} if self.num_return_sequences is None else sampled
        batch = {"batch_size": self.batch_size, "kernel": self.kernel}
        return {"max_new_tokens": self.max_new_tokens, "eos_token_id": ENDS, **batch, **how}

    def cache(self, longest: int) -> RadixCache | None:
        if not self.keeps_answers:
            return None
        return RadixCache() if self.spare is None else RadixCache(max_tokens=longest + self.spare)


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
WAYS = st.builds(
    Way,
    pieces=st.tuples(st.sampled_from([1, 4, 16, 512]), st.sampled_from([8, 100]), st.booleans()),
    kernel=st.sampled_from(["auto", "eager"]),
    batch_size=st.one_of(st.none(), st.integers(1, 5)),
    max_new_tokens=st.integers(1, 6),
    num_return_sequences=st.one_of(st.none(), st.integers(1, 3)),
    keeps_answers=st.sampled_from([True, True, False]),
    spare=st.sampled_from([None, 0, 1, 2, 4, 8]),
)


@pytest.mark.parametrize("name", cases(MODELS, ["gpt-oss"]))
def test_generated_tries(name: str, print_after: Callable[[str, str], None]) -> None:
    model = next(family for family in CORE if family.name == name).build().eval()
    worst, seen = [0.0], {"tries": 0, "found in the cache": 0, "evictions": 0, "ended early": 0}

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(prompts=PROMPTS, way=WAYS, more=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def one_try(prompts: list[list[int]], way: Way, more: list[int]) -> None:
        longest = max(map(len, prompts)) + way.max_new_tokens + len(more)
        cache = way.cache(longest)
        with with_pieces_of(*way.pieces):
            for generated in turns(model, prompts, way, more, cache):
                worst[0] = max(worst[0], check(model, generated, way))
                seen["found in the cache"] += cache is not None and generated.stats.num_cached_tokens
                seen["ended early"] += generated.finish_reasons.count("stop")
        seen["tries"] += 1
        if cache is not None:
            seen["evictions"] += cache.counters.num_evictions
            assert is_idle(cache)

    with float64_throughout(model):
        one_try()
    assert all(seen.values()), f"the tries prove nothing of what is 0 here: {seen}"
    print_after("generation: tries", f"{name}: worst log-probability {worst[0]:.1e}, {seen}")


def turns(
    model: Any, prompts: list[list[int]], way: Way, more: list[int], cache: RadixCache | None
) -> Iterator[Generated]:
    """Answers, answers to what continues them, and to the first prompts again."""
    first = generate(model, prompts, cache=cache, **way.options())
    yield first
    if cache is not None:
        continued = [[*prompt, *answer, *more] for prompt, answer in texts_of(first)]
        yield generate(model, [*continued[:4], *prompts[:2]], cache=cache, **way.options())


def check(model: Any, generated: Generated, way: Way) -> float:
    """Every answer is that of the ordinary model. Returns the largest error of a log-probability."""
    texts, worst = texts_of(generated), 0.0
    for place, logits in enumerate(finished_logits(model, texts)):
        answer = texts[place][1]
        assert way.num_return_sequences is not None or logits.argmax(-1).tolist() == answer
        assert way.num_return_sequences is None or drawn(model, logits, place, way) == answer
        assert len(answer) == way.max_new_tokens or answer[-1] in ENDS
        assert not set(answer[:-1]) & set(ENDS)
        truth = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].numpy()
        error = np.abs(truth - generated.logprobs[place]).max()
        assert error <= BAR, (texts[place], error)
        worst = max(worst, error)
    return worst


def drawn(model: Any, logits: torch.Tensor, place: int, way: Way) -> list[int]:
    """The tokens where the cumulative probability passes the draws of this answer."""
    chooser = TokenChooser(model, model.generation_config, seed=SEED)
    chooser.seed = SEED
    draws = chooser.draws(place, way.max_new_tokens)[: len(logits)]
    return [
        int(np.searchsorted(row.softmax(-1).cumsum(-1).numpy(), draw, side="right"))
        for row, draw in zip(logits, draws, strict=True)
    ]


def test_a_first_short_prompt_is_kept(tiny_qwen3: Callable[..., Any]) -> None:
    """The pool grows when the answer is kept, after the last forward pass of the call."""
    model, cache = tiny_qwen3().eval(), RadixCache()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "cache": cache}
    first = generate(model, [[7, 8, 9]], **options)
    assert cache.num_tokens == 3 + 4 - 1, "the last token was never computed"
    later = generate(model, [[7, 8, 9, *first.token_ids[0], 5]], **options)
    assert later.stats.num_cached_tokens == 6 and later.stats.num_computed_tokens == 2


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_a_budget_that_is_too_small(tiny_qwen3: Callable[..., Any], max_tokens: int) -> None:
    """The error says so, and the cache is as usable as before."""
    model, cache = tiny_qwen3().eval(), RadixCache(max_tokens=max_tokens)
    prompt: Sequence[int] = list(range(1, 40))
    with with_pieces_of(1), pytest.raises(CacheFull, match="raise max_tokens"):
        generate(model, [prompt, [*prompt, 3]], max_new_tokens=2, cache=cache)
    assert is_idle(cache)
    assert len(generate(model, [[1]], max_new_tokens=2, cache=cache, eos_token_id=None).token_ids[0]) == 2


def test_a_prompt_that_ends_inside_a_kept_run(tiny_qwen3: Callable[..., Any]) -> None:
    """Both prompts are one segment of the plan, which ends further than the first of them."""
    model, long = tiny_qwen3(max_position_embeddings=800).eval(), [token % 40 for token in range(600)]
    with float64_throughout(model):
        way = Way((512, 1000, False), "auto", None, 3, None, False, None)
        generated = generate(model, [long[:300], long], **way.options())
        check(model, generated, way)
    assert generated.stats.num_computed_tokens == 600


def test_a_long_sampled_answer(tiny_qwen3: Callable[..., Any]) -> None:
    """Draws are made ahead for the first tokens; the later ones are of the same stream."""
    model = tiny_qwen3().eval()
    way = Way((512, 1000, False), "auto", None, 150, 2, False, None)
    with float64_throughout(model):
        generated = generate(model, [[7, 8], [9]], **{**way.options(), "eos_token_id": None})
        texts = texts_of(generated)
        for place, logits in enumerate(finished_logits(model, texts)):
            assert drawn(model, logits, place, way) == texts[place][1]


def test_nan_stays_in_its_sequence(tiny_qwen3: Callable[..., Any]) -> None:
    """A token without finite keys reaches those who read it, and nobody beside it, before it or in its lane later."""
    model = tiny_qwen3(tie_word_embeddings=False).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[49] = torch.nan
    prompts = [[7, 8, 9], [7, 8, 49, 3], [7, 8, 49], [7, 9, 1], [7, 9], [9, 9], [9, 9, 9, 9]]
    finite = [place for place, prompt in enumerate(prompts) if 49 not in prompt]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with float64_throughout(model):
        for batch_size in (2, 4, None):
            with with_pieces_of(1):
                found = generate(model, prompts, batch_size=batch_size, cache=RadixCache(), **options)
            texts = texts_of(found)
            for place, logits in zip(finite, finished_logits(model, [texts[place] for place in finite]), strict=True):
                truth = logits.log_softmax(-1).max(-1).values
                assert np.abs(truth.numpy() - found.logprobs[place]).max() <= BAR, prompts[place]
            assert all(np.isnan(found.logprobs[place]).all() for place in range(len(prompts)) if place not in finite)
