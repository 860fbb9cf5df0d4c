"""Log-probabilities of completions, beside ordinary forward passes in float64."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from answers import is_idle, logprobs_by_the_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiers import TRIES

from radixtrain import RadixCache, generate, score_completions, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation import passes, score
from radixtrain.generation.cache import CacheFull
from radixtrain.generation.score import CompletionScore
from radixtrain.hf.cached_pass import StoredPasses
from radixtrain.testing import ragged_batches

Ids = list[int]
PROMPTS = [[7, 8, 9, 1, 2], [30, 31], [7, 8, 9, 3], [5]]
COMPLETIONS = [[1], [2, 3, 4], [2, 3], [1, 2, 3, 4, 5, 6]]
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(vocab_size=400).double().eval()


def assert_right(
    model: Any, found: list[list[CompletionScore]], prompts: list[Ids], of_prompts: list[list[Ids]]
) -> None:
    assert [[each.token_ids for each in scores] for scores in found] == of_prompts
    for prompt, scores in zip(prompts, found, strict=True):
        for each in scores:
            assert each.logprobs == pytest.approx(logprobs_by_the_model(model, prompt, each.token_ids), abs=1e-12)


class TestScores:
    def test_of_every_prompt(self, model: Any) -> None:
        found = score_completions(model, PROMPTS, COMPLETIONS)
        assert_right(model, found, PROMPTS, [COMPLETIONS] * 4)

    def test_of_each_prompt(self, model: Any) -> None:
        """As many as each has, none too."""
        of_prompts = [COMPLETIONS[:1], [], COMPLETIONS[1:], [[9, 9]]]
        assert_right(model, score_completions(model, PROMPTS, of_prompts), PROMPTS, of_prompts)

    def test_equal_ones(self, model: Any) -> None:
        """Prompts, completions, and one prompt and completion that read as another."""
        prompts, of_prompts = [[1, 2], [1, 2], [1]], [[[3, 4], [3, 4]], [[3, 4]], [[2, 3, 4]]]
        assert_right(model, score_completions(model, prompts, of_prompts), prompts, of_prompts)

    def test_sums_and_means(self, model: Any) -> None:
        (each,) = score_completions(model, [[7, 8]], [[1, 2, 3]])[0]
        assert each.logprob == pytest.approx(math.fsum(each.logprobs))
        assert each.mean_logprob == pytest.approx(each.logprob / 3) and each.logprob < each.mean_logprob < 0
        assert isinstance(each.logprob, float) and all(type(logprob) is float for logprob in each.logprobs)

    def test_texts(self, model: Any, tokenizer: Any) -> None:
        """A completion is tokenised by itself, without special tokens."""
        prompts, completions = ["Where is the saw? ", "Where is the plum? "], ["Shelf one.", "Shelf two."]
        ids = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in completions]
        found = score_completions(model, prompts, completions, tokenizer=tokenizer)
        assert_right(model, found, tokenizer(prompts)["input_ids"], [ids, ids])

    def test_prepared_and_adapted(self, tiny_qwen3: Callable[..., Any]) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
        model = get_peft_model(share_prefixes(tiny_qwen3().double()), config).double().train()
        found = score_completions(model, PROMPTS, COMPLETIONS)
        assert model.training
        assert_right(model.eval(), found, PROMPTS, [COMPLETIONS] * 4)

    @pytest.mark.usefixtures("hooks_that_may_stay")
    @pytest.mark.parametrize("name", ["MAX_SEQUENCES", "MAX_LOGITS"])
    def test_several_passes(self, model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """The later ones go on with what the earlier ones computed."""
        monkeypatch.setattr(score, name, {"MAX_SEQUENCES": 3, "MAX_LOGITS": 4 * 400}[name])
        monkeypatch.setattr(passes, "PIECE_CELLS", 3)
        sizes: Ids = []
        handle = model.lm_head.register_forward_pre_hook(lambda head, args: sizes.append(args[0].shape[1]))
        found = score_completions(model, PROMPTS, COMPLETIONS)
        handle.remove()
        assert sum(sizes) == 4 * 12 and len(sizes) >= 6
        assert name == "MAX_SEQUENCES" or max(sizes) == 6, "one completion is never cut"
        assert_right(model, found, PROMPTS, [COMPLETIONS] * 4)


class TestWork:
    """Counted in rows of forward passes."""

    def rows(self, model: Any, *arguments: Any, **options: Any) -> int:
        own = StoredPasses.logits
        with patch.object(StoredPasses, "logits", autospec=True, side_effect=own) as passes:  # a hook empties the cache
            score_completions(model, *arguments, **options)
        return sum(len(call.args[1]) for call in passes.call_args_list)

    def test_the_second_time(self, model: Any) -> None:
        """Prompts are in the cache, but for the token that predicts; completions are not."""
        cache = RadixCache()
        prompts, completions = [list(range(60)), [*range(60), 99]], [[n, n] for n in range(10)]
        assert self.rows(model, prompts, completions, cache=cache) == 61 + 20
        assert is_idle(cache) and 59 <= cache.num_tokens <= 61
        before = cache.counters.num_hits
        assert self.rows(model, prompts, completions, cache=cache) <= 2 + 1 + 20
        assert cache.counters.num_hits - before >= 20 * 59
        found = score_completions(model, prompts, completions, cache=cache)
        assert_right(model, found, prompts, [completions] * 2)

    def test_after_generating(self, model: Any) -> None:
        """Answers that the cache holds are computed again where they predict, prompts are not."""
        cache, prompt = RadixCache(), list(range(50))
        answers = generate(model, [prompt], cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None).token_ids
        assert self.rows(model, [prompt], answers, cache=cache) == 4
        assert_right(model, score_completions(model, [prompt], answers, cache=cache), [prompt], [answers])
        assert is_idle(cache)


@example([[1, 2, 3, 5, 6, 7]], [[1, 2, 3, 5, 6], [1, 2], [1, 2, 3, 8]], [[9, 9], [3, 6, 7], [4, 4]], 512, None)
@settings(max_examples=TRIES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ragged_batches(max_sequences=3),
    ragged_batches(max_sequences=4),
    ragged_batches(max_sequences=4, max_length=5),
    st.sampled_from([1, 3, 512]),
    st.sampled_from([None, 30]),
)
def test_generated_tries_on_a_cache_that_holds_others(
    model: Any, cached: list[Ids], prompts: list[Ids], completions: list[Ids], cells: int, max_tokens: int | None
) -> None:
    """The example was 0.4 off: a short prompt whose completion goes on like longer prompts that the cache holds."""
    cache, of_prompts = RadixCache(max_tokens), [completions] * len(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PIECE_CELLS", cells)
        generate(model, cached, cache=cache, max_new_tokens=2, do_sample=False, eos_token_id=None)
        for _ in range(2):
            assert_right(model, score_completions(model, prompts, completions, cache=cache), prompts, of_prompts)
            assert is_idle(cache)


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "completions", "message"),
        [
            (PROMPTS, "one", "completions must be a list, got str"),
            (PROMPTS, 3, "completions must be a list, got int"),
            (PROMPTS, [[[1]], [[2]]], "completions: 2 lists for 4 prompts; give one for each"),
            (PROMPTS, [[1], []], "completion 1 must have at least one token"),
            (PROMPTS, ["one"], "completion 0 is a text: give the tokenizer, or token ids"),
            (PROMPTS[:1], [[[True]]], "completion 0: expected a text or a list"),
            (PROMPTS, [[1], [2, 400]], "completion 1 has the token id 400, .* for ids from 0 to 399"),
            ([[1], [-3]], [[1]], "prompt 1 has the token id -3"),
            ([[1], []], [[1]], "prompt 1"),
            (["one"], [[1]], "prompt 0 is a text, which needs a tokenizer"),
        ],
    )
    def test_by_name(self, model: Any, prompts: Any, completions: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            score_completions(model, prompts, completions)

    def test_a_hybrid(self, tiny_hybrid: Callable[..., Any]) -> None:
        with pytest.raises(UserError, match=r"has recurrent layers, .* use model.generate"):
            score_completions(tiny_hybrid("LFM2"), PROMPTS, COMPLETIONS)

    def test_a_budget_that_is_too_small(self, model: Any) -> None:
        """For one: a prompt of 60 keeps what no completion is long enough for."""
        cache = RadixCache(max_tokens=20)
        with pytest.raises(CacheFull):
            score_completions(model, [list(range(60))], COMPLETIONS, cache=cache)
        assert is_idle(cache) and cache.num_tokens == 0

    def test_a_budget_for_one_at_a_time(self, model: Any) -> None:
        cache, prompts = RadixCache(max_tokens=60), [list(range(n, n + 50)) for n in (0, 100, 200)]
        assert_right(model, score_completions(model, prompts, COMPLETIONS, cache=cache), prompts, [COMPLETIONS] * 3)
        assert is_idle(cache) and cache.num_tokens <= 60
