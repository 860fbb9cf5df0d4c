"""The public call: every argument, what it leaves behind, and its errors."""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from radixtrain import RadixCache, generate, prepare_model, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation import passes, prefill
from radixtrain.generation.cache import CacheFull
from radixtrain.generation.generate import _limits, _longest_tail
from radixtrain.generation.requests import Request
from radixtrain.generation.store import KeyValueStore

Ids = list[int]
PROMPTS = [[7, 8, 9, 1, 2], [30, 31], [7, 8, 9, 3], [7, 8, 9, 1, 2], [5]]
CHAT = [[{"role": "user", "content": f"Where is the {thing}?"}] for thing in ("saw", "plum")]
# of a model whose answers never end
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
SAMPLED: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "top_k": None, "temperature": 2.0}


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(vocab_size=400, num_hidden_layers=1, eos_token_id=None).double().eval()


@pytest.fixture(scope="module")
def tokenizer(shop: Path) -> Any:
    return AutoTokenizer.from_pretrained(shop / "model")


def expected(model: Any, prompts: list[Ids], num_new: int = 4) -> list[Ids]:
    """Greedy answers of each prompt alone."""
    found = []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(num_new):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


def answers(model: Any, prompts: Any = PROMPTS, **options: Any) -> list[Ids]:
    return generate(model, prompts, **{**GREEDY, **options}).token_ids


class TestPrompts:
    def test_lists_of_ids_in_their_order(self, model: Any) -> None:
        found = generate(model, PROMPTS, **GREEDY)
        assert found.token_ids == expected(model, PROMPTS)
        assert (found.prompt_ids, found.texts, found.num_return_sequences) == (PROMPTS, None, 1)
        assert found.finish_reasons == ["length"] * 5 and [len(each) for each in found.logprobs] == [4] * 5

    def test_as_model_generate_returns_them(self, model: Any) -> None:
        longest = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
        theirs = model.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY)
        assert torch.equal(generate(model, PROMPTS, **GREEDY).sequences(0), theirs)

    def test_a_padded_tensor(self, model: Any) -> None:
        ids, mask = torch.tensor([[0, 30, 31], [7, 8, 0]]), torch.tensor([[0, 1, 1], [1, 1, 0]])
        assert generate(model, ids, attention_mask=mask, **GREEDY).prompt_ids == [[30, 31], [7, 8]]
        assert answers(model, ids, attention_mask=mask) == expected(model, [[30, 31], [7, 8]])

    def test_texts(self, model: Any, tokenizer: Any) -> None:
        found = generate(model, ["Shelf one.", "Shelf"], tokenizer=tokenizer, **GREEDY)
        assert found.prompt_ids == tokenizer(["Shelf one.", "Shelf"])["input_ids"]
        assert found.token_ids == expected(model, found.prompt_ids)
        assert found.texts == tokenizer.batch_decode(found.token_ids, skip_special_tokens=True)

    def test_conversations(self, model: Any, tokenizer: Any) -> None:
        found = generate(model, CHAT, tokenizer=tokenizer, **GREEDY)
        rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert found.prompt_ids == rendered and found.token_ids == expected(model, rendered)

    def test_chat_template_kwargs(self, model: Any, tokenizer: Any) -> None:
        with pytest.raises(UserError, match="shelf_life"):
            generate(model, CHAT, tokenizer=tokenizer, chat_template_kwargs={"shelf_life": 3}, **GREEDY)

    def test_none(self, model: Any) -> None:
        found = generate(model, [], **GREEDY)
        assert len(found) == 0 and found.prompt_ids == found.finish_reasons == [] == found.logprobs
        assert (found.stats.num_prompt_tokens, found.stats.num_new_tokens) == (0, 0)
        assert found.sequences(0).shape == (0, 0)

    def test_several_answers_stand_together(self, model: Any) -> None:
        found = generate(model, PROMPTS, num_return_sequences=3, seed=1, **SAMPLED)
        again = generate(model, PROMPTS, num_return_sequences=3, seed=1, batch_size=2, **SAMPLED)
        assert len(found) == 15 and found.num_return_sequences == 3
        assert found.token_ids == again.token_ids
        for place, answer in enumerate(found.token_ids):
            assert len(answer) == 4, place
        assert len(set(map(tuple, found.token_ids))) > 10, "samples differ, those of equal prompts too"
        assert found.stats.num_prompt_tokens == 3 * sum(map(len, PROMPTS))

    def test_logprobs_are_those_of_the_model(self, model: Any) -> None:
        found = generate(model, PROMPTS[:3], num_return_sequences=2, seed=1, **SAMPLED)
        for place, (answer, logprobs) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
            prompt = PROMPTS[place // 2]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[
                    0, len(prompt) - 1 : -1
                ]
            truth = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
            assert logprobs == pytest.approx(truth.tolist(), abs=1e-12)


class TestArguments:
    def test_generation_config_and_options(self, model: Any) -> None:
        config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert generate(model, PROMPTS, generation_config=config).token_ids == expected(model, PROMPTS, 2)
        both = generate(model, PROMPTS, generation_config=config, max_new_tokens=3)
        assert both.token_ids == expected(model, PROMPTS, 3) and config.max_new_tokens == 2

    def test_max_length_counts_the_prompt(self, model: Any) -> None:
        found = generate(model, PROMPTS, max_length=6, do_sample=False, eos_token_id=None).token_ids
        assert [len(answer) for answer in found] == [1, 4, 2, 1, 5]

    def test_eos(self, model: Any) -> None:
        whole = expected(model, PROMPTS)
        end = whole[0][1]
        found = generate(model, PROMPTS, **{**GREEDY, "eos_token_id": end})
        cut = [answer[: answer.index(end) + 1] if end in answer else answer for answer in whole]
        assert found.token_ids == cut
        assert found.finish_reasons == ["stop" if end in answer else "length" for answer in whole]

    def test_stop_strings(self, model: Any, tokenizer: Any) -> None:
        token = tokenizer("Shelf", add_special_tokens=False)["input_ids"][0]
        forced = {"sequence_bias": {(token,): 1e3}, "tokenizer": tokenizer}
        found = generate(model, ["one"], stop_strings=2 * tokenizer.decode([token]), **forced, **GREEDY)
        assert found.token_ids == [[token] * 2] and found.finish_reasons == ["stop"]

    def test_logits_processor(self, model: Any) -> None:
        """It sees whole texts, and its answer is taken, while the log-probability is the model's own."""
        texts = []

        def always_9(token_ids: Tensor, scores: Tensor) -> Tensor:
            texts.extend(map(tuple, token_ids.tolist()))
            return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([9]), 0.0)

        found = generate(model, [[1, 2], [5]], logits_processor=[always_9], **GREEDY)
        assert found.token_ids == [[9] * 4] * 2 and all(logprob < -1 for logprob in found.logprobs[0])
        assert sorted(texts) == sorted((*ids, *[9] * n) for ids in ([1, 2], [5]) for n in range(4))

    def test_stopping_criteria(self, model: Any) -> None:
        def three_tokens(token_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
            return torch.full((len(token_ids),), token_ids.shape[1] >= 3)

        found = generate(model, [[1, 2], [5]], stopping_criteria=[three_tokens], **GREEDY)
        assert [len(answer) for answer in found.token_ids] == [1, 2] and found.finish_reasons == ["stop"] * 2

    @pytest.mark.parametrize("batch_size", [1, 2, 100])
    def test_batch_size(self, model: Any, batch_size: int) -> None:
        sizes = []
        handle = model.model.register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            assert answers(model, [[1], [2], [3]], batch_size=batch_size) == expected(model, [[1], [2], [3]])
        finally:
            handle.remove()
        assert max(sizes[: -4 * 3]) == min(batch_size, 3), "the last twelve are those of `expected`, of 1 to 4 tokens"

    @pytest.mark.parametrize("kernel", ["auto", "torch", "eager"])
    def test_kernel(self, model: Any, kernel: str) -> None:
        assert answers(model, kernel=kernel) == expected(model, PROMPTS)

    def test_seed(self, model: Any) -> None:
        one, again, other = (answers(model, **SAMPLED, seed=seed) for seed in (1, 1, 2))
        assert one == again != other

    def test_a_seed_touches_no_generator(self, model: Any) -> None:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]  # noqa: NPY002
        answers(model, **SAMPLED, seed=1)
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
        assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]  # noqa: NPY002

    def test_without_a_seed_torch_decides(self, model: Any) -> None:
        found = []
        for manual in (3, 3, 4):
            torch.manual_seed(manual)
            found.append(answers(model, **SAMPLED))
        assert found[0] == found[1] != found[2]

    def test_an_answer_depends_on_its_place_only(self, model: Any) -> None:
        """Not on the prompts after it, which are computed before it if they are sorted before it."""
        whole = answers(model, **SAMPLED, seed=1)
        assert answers(model, PROMPTS[:2], **SAMPLED, seed=1) == whole[:2]


class TestCache:
    def test_what_a_call_computed_is_there_for_the_next(self, model: Any) -> None:
        cache = RadixCache()
        first = generate(model, PROMPTS, cache=cache, **GREEDY)
        second = generate(model, PROMPTS, cache=cache, **GREEDY)
        assert first.token_ids == second.token_ids == expected(model, PROMPTS)
        assert first.stats.num_cached_tokens < second.stats.num_cached_tokens == sum(len(ids) - 1 for ids in PROMPTS)
        assert second.stats.num_computed_tokens == 4, "the last token of each prompt, of the two equal ones once"

    def test_one_conversation(self, model: Any) -> None:
        cache, text = RadixCache(), [7, 8, 9]
        for _ in range(3):
            found = generate(model, [text], cache=cache, **GREEDY)
            assert found.token_ids == expected(model, [text])
            text = [*text, *found.token_ids[0], 30]
        assert (found.stats.num_cached_tokens, found.stats.num_computed_tokens) == (3 + 4 + 1 + 3, 2)

    def test_other_weights_empty_it(self, tiny_qwen3: Callable[..., Any]) -> None:
        model, cache = tiny_qwen3().double(), RadixCache()
        answers(model, cache=cache)
        with torch.no_grad():
            model.model.norm.weight.mul_(0.5)
            model.model.layers[0].self_attn.v_proj.weight.mul_(2)
        found = generate(model, PROMPTS[:1], cache=cache, **GREEDY)
        assert found.token_ids == expected(model, PROMPTS[:1]) and found.stats.num_cached_tokens == 0

    def test_a_budget(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(passes, "PIECE_CELLS", 3)
        cache = RadixCache(max_tokens=12)
        for _ in range(2):
            assert answers(model, cache=cache) == expected(model, PROMPTS)
            assert cache.num_tokens <= 12 and cache.num_reserved == cache.root.locks == 0

    def test_a_budget_that_is_too_small(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(passes, "PIECE_CELLS", 3)
        cache, prompts = RadixCache(max_tokens=2), [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
        with pytest.raises(UserError, match="max_tokens=2 has room for 2 more tokens") as raised:
            answers(model, prompts, cache=cache)
        assert isinstance(raised.value, CacheFull) and cache.pool.num_free == cache.pool.capacity

    def test_after_an_error_it_is_free(self, model: Any) -> None:
        cache, calls = RadixCache(), []

        def third(token_ids: Tensor, scores: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise ZeroDivisionError
            return scores

        with pytest.raises(ZeroDivisionError):
            answers(model, cache=cache, batch_size=2, logits_processor=[third])
        assert cache.num_reserved == cache.root.locks == 0
        assert cache.pool.capacity - cache.pool.num_free == cache.num_tokens
        assert answers(model, cache=cache) == expected(model, PROMPTS)

    def test_without_one_the_memory_is_given_back(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """At once, without a garbage collection."""
        made: list[weakref.ref[KeyValueStore]] = []

        class Watched(KeyValueStore):
            def __init__(self, *arguments: Any):
                super().__init__(*arguments)
                made.append(weakref.ref(self))

        monkeypatch.setattr(prefill, "KeyValueStore", Watched)
        gc.disable()
        try:
            found = generate(model, PROMPTS, **GREEDY)
            with contextlib.suppress(ZeroDivisionError):
                answers(model, logits_processor=[lambda token_ids, scores: 1 / 0])
        finally:
            gc.enable()
        assert len(found) == 5 and [ref() for ref in made] == [None, None]

    def test_an_empty_cache_takes_no_memory(self, model: Any) -> None:
        cache = RadixCache()
        answers(model, cache=cache)
        assert cache.store.num_bytes > 0
        cache.clear()
        assert cache.store.num_bytes == 0 and answers(model, cache=cache) == expected(model, PROMPTS)


class TestModel:
    @pytest.mark.parametrize("prepare", [prepare_model, share_prefixes])
    def test_prepared(self, tiny_qwen3: Callable[..., Any], prepare: Callable[..., Any]) -> None:
        model = tiny_qwen3().double().train()
        truth = expected(model, PROMPTS)
        prepared = prepare(model)
        assert answers(prepared) == truth
        assert prepared.training and all(parameter.requires_grad for parameter in prepared.parameters())

    def test_adapters(self, tiny_qwen3: Callable[..., Any]) -> None:
        """Their dropout is off, and they count."""
        options = {"target_modules": ["q_proj", "v_proj", "up_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
        torch.manual_seed(0)
        model = get_peft_model(tiny_qwen3().double(), LoraConfig(r=4, **options)).double().train()
        found = answers(model)
        assert model.training and found == expected(model.eval(), PROMPTS)
        with model.disable_adapter():
            assert answers(model) == expected(model, PROMPTS) != found

    def test_gradient_checkpointing(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3().double().train()
        model.gradient_checkpointing_enable()
        assert answers(model) == expected(model.eval(), PROMPTS)

    def test_in_half_precision(self, tiny_qwen3: Callable[..., Any]) -> None:
        found = generate(tiny_qwen3().bfloat16(), PROMPTS, cache=RadixCache(), **GREEDY)
        assert [len(answer) for answer in found.token_ids] == [4] * 5

    def test_its_own_options_count(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3().double()
        model.generation_config.max_new_tokens = 2
        assert generate(model, PROMPTS, do_sample=False).token_ids == expected(model, PROMPTS, 2)


class TestErrors:
    """None of them is found out after something was computed."""

    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            ([[1], [2, 400]], {}, "prompt 1 has the token id 400, and the model has embeddings for ids from 0 to 399"),
            ([[1], [2, -1]], {}, "prompt 1 has the token id -1, .* is it the tokenizer of this model"),
            ([[1], []], {}, "prompt 1"),
            ([1, 2], {}, r"for one prompt write \[token_ids\]"),
            (["a text"], {}, "prompt 0 is a text, which needs a tokenizer"),
            (CHAT, {}, "prompt 0 is a conversation, which needs a tokenizer"),
            ([[1]], {"attention_mask": torch.ones(1, 1)}, "attention_mask is for prompts in one"),
            ([[1]], {"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
            ([[1]], {"batch_size": 2.0}, r"batch_size must be a whole number of at least 1, got 2\.0"),
            ([[1]], {"batch_size": True}, "batch_size must be a whole number of at least 1, got True"),
            ([[1]], {"kernel": "fast"}, "kernel must be auto, .*; got 'fast'"),
            ([[1]], {"kernel": "flash_attn"}, "kernel='flash_attn' cannot be used: .*; kernel='auto' takes what can"),
            ([[1]], {"num_beams": 2}, "num_beams"),
            ([[1]], {"max_new_token": 2}, "max_new_tokens"),
            ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
            ([[1, 2, 3]], {"max_new_tokens": None, "max_length": 3}, "prompt 0"),
            ([[1]], {"stop_strings": "x"}, "stop_strings need the model's tokenizer"),
            ([[1]], {"logits_processor": 3}, "logits_processor"),
            ([[1]], {"stopping_criteria": 3}, "stopping_criteria"),
        ],
    )
    def test_by_name(self, model: Any, prompts: Any, options: dict[str, Any], message: str) -> None:
        def refuse(*arguments: Any) -> None:
            raise AssertionError("the model ran")

        handle = model.register_forward_pre_hook(refuse)
        try:
            with pytest.raises(UserError, match=message):
                generate(model, prompts, **{**GREEDY, **options})
        finally:
            handle.remove()

    def test_a_model_that_is_none(self) -> None:
        with pytest.raises(TypeError, match="PreTrainedModel inside, and Linear has 0"):
            generate(torch.nn.Linear(2, 2), [[1]])

    def test_a_hybrid(self, tiny_hybrid: Callable[..., Any]) -> None:
        with pytest.raises(UserError, match=r"has recurrent layers, .* use model.generate"):
            generate(tiny_hybrid("Qwen3.5"), [[1]], **GREEDY)


class TestLimits:
    @pytest.mark.parametrize(
        ("tails", "expected"),
        [
            ([1] * 10, 1),
            ([0], 1),
            ([100, 100, 100, 1000], 100),  # a product of its own for one: 4 x 100 + 512 pairs, not 4 x 1000
            ([600, 1000], 600),
            ([900, 1000], 1000),  # 2 x 900 + 512 are more than 2 x 1000
        ],
    )
    def test_longest_tail(self, tails: Ids, expected: int) -> None:
        """Lanes are padded to the longest."""
        assert _longest_tail(np.array(tails)) == expected

    def requests(self, *prompts: tuple[int, int], max_new: int = 10) -> list[Request]:
        """Lengths, and how much of each is kept."""
        return [Request(0, np.zeros(length, dtype=int), max_new, np.zeros(0), kept=kept) for length, kept in prompts]

    def test_lanes_hold_what_is_not_kept(self) -> None:
        limits = _limits(self.requests((100, 90), (110, 95), (95, 95)), None)
        assert limits == (3, 15, 15 + 10)

    def test_how_many(self) -> None:
        many = self.requests(*[(5, 0)] * 300)
        assert _limits(many, None).num_lanes == 256 and _limits(many, 270).num_lanes == 270
        long = self.requests(*[(5, 0)] * 300, max_new=1000)
        assert _limits(long, None).num_lanes == 65_536 // (5 + 1000)
        longest = _limits(self.requests(*[(5, 0)] * 300, max_new=100_000), None)  # answers are mostly shorter
        assert longest.num_lanes == 65_536 // (5 + 1024)
        assert longest.lane_length == 5 + 128
