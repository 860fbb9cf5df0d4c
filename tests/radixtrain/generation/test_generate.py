"""The public call: every argument, what it leaves behind, and its errors."""

import contextlib
import copy
import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import greedy_by_the_model
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3Model

from radixtrain import RadixCache, generate, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation.generate import Generated, GenerationStats
from radixtrain.generation.store import KeyValueStore
from radixtrain.verification.oracle import float64_arithmetic

Ids = list[int]
PROMPTS = [[7, 8, 9, 1, 2], [30, 31], [7, 8, 9, 3], [7, 8, 9, 1, 2], [5]]
CHAT = [[{"role": "user", "content": f"Where is the {thing}?"}] for thing in ("saw", "plum")]
# of a model whose answers never end
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
SAMPLED: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "top_k": None, "temperature": 2.0}
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(vocab_size=400, eos_token_id=None).double().eval()


def answers(model: Any, prompts: Any = PROMPTS, **options: Any) -> list[Ids]:
    return generate(model, prompts, **{**GREEDY, **options}).token_ids


class TestPrompts:
    def test_lists_of_ids_in_their_order(self, model: Any) -> None:
        found = generate(model, PROMPTS, **GREEDY)
        assert found.token_ids == greedy_by_the_model(model, PROMPTS, 4)
        assert (found.prompt_ids, found.texts, found.num_return_sequences) == (PROMPTS, None, 1)
        assert found.finish_reasons == ["length"] * 5 and [len(each) for each in found.logprobs] == [4] * 5

    def test_as_model_generate_returns_them(self, model: Any) -> None:
        longest = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
        theirs = model.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY)
        assert torch.equal(generate(model, PROMPTS, **GREEDY).sequences(0), theirs)

    def test_texts_and_conversations(self, model: Any, tokenizer: Any) -> None:
        found = generate(model, ["Shelf one.", *CHAT], tokenizer, **GREEDY)
        rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert found.prompt_ids == [tokenizer("Shelf one.")["input_ids"], *rendered]
        assert found.token_ids == greedy_by_the_model(model, found.prompt_ids, 4)
        assert found.texts == tokenizer.batch_decode(found.token_ids, skip_special_tokens=True)
        with pytest.raises(UserError, match="shelf_life"):
            generate(model, CHAT, tokenizer=tokenizer, chat_template_kwargs={"shelf_life": 3}, **GREEDY)

    def test_none(self, model: Any) -> None:
        found = generate(model, [], **GREEDY)
        assert found.prompt_ids == found.token_ids == found.logprobs == [] and found.stats.num_new_tokens == 0
        assert found.sequences(0).shape == (0, 0) and str(found).startswith("0 answers to 0 prompts: ")

    def test_several_answers_stand_together(self, model: Any) -> None:
        found = generate(model, PROMPTS, num_return_sequences=3, seed=1, **SAMPLED)
        assert len(found) == 15 and found.num_return_sequences == 3 and {*map(len, found.token_ids)} == {4}
        assert len(set(map(tuple, found.token_ids))) > 10, "samples differ, those of equal prompts too"
        assert found.stats.num_prompt_tokens == 3 * sum(map(len, PROMPTS))


class TestArguments:
    def test_generation_config_and_options(self, model: Any) -> None:
        config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert generate(model, PROMPTS, generation_config=config).token_ids == greedy_by_the_model(model, PROMPTS, 2)
        both = generate(model, PROMPTS, generation_config=config, max_new_tokens=3)
        assert both.token_ids == greedy_by_the_model(model, PROMPTS, 3) and config.max_new_tokens == 2

    def test_max_length_counts_the_prompt(self, model: Any) -> None:
        found = generate(model, PROMPTS, max_length=6, do_sample=False, eos_token_id=None).token_ids
        assert [len(answer) for answer in found] == [1, 4, 2, 1, 5]

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


class TestCache:
    def test_what_a_call_computed_is_there_for_the_next(self, model: Any) -> None:
        cache = RadixCache()
        first = generate(model, PROMPTS, cache=cache, **GREEDY)
        second = generate(model, PROMPTS, cache=cache, **GREEDY)
        assert first.token_ids == second.token_ids == greedy_by_the_model(model, PROMPTS, 4)
        assert first.stats.num_cached_tokens < second.stats.num_cached_tokens == sum(len(ids) - 1 for ids in PROMPTS)
        assert second.stats.num_computed_tokens == 4, "the last token of each prompt, of the two equal ones once"

    def test_without_one_the_memory_is_given_back(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """At once, without a garbage collection."""
        made: list[weakref.ref[KeyValueStore]] = []

        class Watched(KeyValueStore):
            def __init__(self, *arguments: Any):
                super().__init__(*arguments)
                made.append(weakref.ref(self))

        monkeypatch.setattr("radixtrain.generation.cache.KeyValueStore", Watched)
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
        assert cache.store.calls
        cache.clear()
        assert not cache.store.calls and answers(model, cache=cache) == greedy_by_the_model(model, PROMPTS, 4)


class TestModel:
    @pytest.mark.parametrize("prepare", [share_prefixes])
    def test_prepared(self, tiny_qwen3: Callable[..., Any], prepare: Callable[..., Any]) -> None:
        model = tiny_qwen3().double().train()
        truth = greedy_by_the_model(model, PROMPTS, 4)
        prepared = prepare(model)
        assert answers(prepared) == truth
        assert prepared.training and all(parameter.requires_grad for parameter in prepared.parameters())

    def test_gradient_checkpointing(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3().double().train()
        model.gradient_checkpointing_enable()
        assert answers(model) == greedy_by_the_model(model.eval(), PROMPTS, 4)


class TestPaddingWithoutMask:
    """As `model.generate`: the pad token is padding unless it is an end token too."""

    PADDED = torch.tensor([[0, 0, 0, 30, 31], [7, 8, 9, 1, 2]])

    @pytest.mark.parametrize("options", [{"pad_token_id": 0}, {"pad_token_id": 0, "eos_token_id": 0}, {}])
    def test_are_the_answers_of_hugging_face(self, model: Any, options: dict[str, Any]) -> None:
        given = {**GREEDY, "pad_token_id": 49, **options}
        expected = model.generate(self.PADDED, **given)[:, self.PADDED.shape[1] :].tolist()
        found = generate(model, self.PADDED, **given).token_ids
        assert [each[: len(answer)] for each, answer in zip(expected, found, strict=True)] == found


class Wrapped(nn.Module):
    """As DistributedDataParallel: the model is a part of it, and its attributes are not seen."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


class TestOtherModels:
    @pytest.mark.parametrize("wrap", [Wrapped, lambda model: torch.compile(model, backend="eager")])
    def test_a_wrapped_one(self, model: Any, wrap: Callable[[Any], Any]) -> None:
        """Its own generation config is read: token 3 is suppressed."""
        model = copy.deepcopy(model)
        first = [answer[0] for answer in generate(model, PROMPTS, **GREEDY).token_ids]
        model.generation_config = GenerationConfig(suppress_tokens=first)
        expected = generate(model, PROMPTS, **GREEDY).token_ids
        assert generate(wrap(model), PROMPTS, cache=RadixCache(), **GREEDY).token_ids == expected
        assert not set(first) & {token for answer in expected for token in answer}

    def test_a_backbone(self, model: Any) -> None:
        assert isinstance(model.model, Qwen3Model)
        with pytest.raises(UserError, match="no head that predicts next tokens; load it with AutoModelForCausalLM"):
            generate(model.model, PROMPTS, **GREEDY)

    @pytest.mark.parametrize(
        ("model_class", "message"),
        [
            ("BertForMaskedLM", "BertForMaskedLM is not a causal language model"),
            ("T5ForConditionalGeneration", "an encoder and a decoder; use model"),
        ],
    )
    def test_an_encoder(self, model_class: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            generate(tiny_model(model_class), PROMPTS, **GREEDY)

    @pytest.mark.usefixtures("hooks_that_may_stay")
    def test_one_that_another_thread_calls(self, model: Any) -> None:
        """It gets all rows, not those of the pass that runs just then."""
        ids, found = torch.tensor([[1, 2, 3, 4]]), []

        def call() -> None:
            with float64_arithmetic():
                found.append(model(input_ids=ids).logits)

        def in_another_thread(*_: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()

        expected = model(input_ids=ids).logits
        handle = model.model.layers[0].register_forward_pre_hook(in_another_thread)
        try:
            generate(model, PROMPTS, **GREEDY)
        finally:
            handle.remove()
        assert found
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-12)


class TestWhatATokenizerReturned:
    def test_an_image_is_not_lost(self, model: Any) -> None:
        """A processor's placeholders for it would be answered as if they were words."""
        prompts = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": torch.zeros(1, 3, 4, 4)}
        with pytest.raises(UserError, match="prompts: pixel_values is not supported"):
            generate(model, prompts, **GREEDY)

    @pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
    def test_types_of_tokens(self, model: Any, name: str) -> None:
        """Those of plain text are zeros."""
        ids = torch.tensor([[7, 8, 9]])
        found = generate(model, {"input_ids": ids, name: torch.zeros_like(ids)}, **GREEDY)
        assert found.prompt_ids == ids.tolist()
        with pytest.raises(UserError, match=f"prompts: {name} is not supported"):
            generate(model, {"input_ids": ids, name: torch.ones_like(ids)}, **GREEDY)

    @pytest.mark.parametrize("mask", [None, [1, 1, 1], [0, 1, 1]])
    def test_of_one_text(self, model: Any, mask: Ids | None) -> None:
        prompts = {"input_ids": [7, 8, 9], **({} if mask is None else {"attention_mask": mask})}
        assert generate(model, prompts, **GREEDY).prompt_ids == [[7, 8, 9] if mask != [0, 1, 1] else [8, 9]]


class TestResult:
    STATS = GenerationStats(
        num_prompt_tokens=1200, num_cached_tokens=300, num_computed_tokens=150, num_new_tokens=12, seconds=0.5
    )

    def result(self, texts: list[str] | None, token_ids: list[Ids]) -> Generated:
        count = len(token_ids)
        logprobs, ends = [[-0.5] * len(ids) for ids in token_ids], ["stop"] * count
        return Generated([[5]] * (count // 2), token_ids, texts, logprobs, ends, 2, self.STATS)

    def test_stats(self) -> None:
        assert (self.STATS.r, GenerationStats(10, 10, 0, 1, 0.1).r) == (8.0, math.inf)
        empty = GenerationStats(0, 0, 0, 0, 0.0)
        assert math.isnan(empty.r) and "0 new tokens in 0.00 s" in str(empty)
        assert str(self.STATS) == (
            "1,200 prompt tokens, 150 computed (r 8.00), 300 from the cache; 12 new tokens in 0.50 s, 24 a second"
        )

    def test_the_first_answers_are_shown(self) -> None:
        texts = ["one  two\n", "x" * 70] * 6
        lines = str(self.result(texts, [[1, 2], [3]] * 6)).splitlines()
        assert lines[1:4] == [
            "prompt  tokens  end     logprob  answer",
            "     0       2  stop      -1.00  one two",
            f"     0       1  stop      -0.50  {'x' * 56} ...",
        ]
        assert len(lines) == 13 and lines[-1] == "... and 2 more"
        without_texts = str(self.result(None, [[1, 2], [*range(20)]]))
        assert "  1 2\n" in without_texts and without_texts.endswith("0 1 2 3 4 5 6 7 8 9 10 11 ...")

    def test_no_pad_token(self, model: Any) -> None:
        """Tokenizers of base models often have none."""
        with pytest.raises(UserError, match="pad_token_id: expected a token id to pad with, got None"):
            self.result(None, [[1], [2]]).sequences(None)  # type: ignore[arg-type]


class TestErrors:
    """None of them is found out after something was computed."""

    @pytest.mark.usefixtures("hooks_that_may_stay")
    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            ([[1], [2, 400]], {}, "prompt 1 has the token id 400, and the model has embeddings for ids from 0 to 399"),
            ([[1], [2, -1]], {}, "prompt 1 has the token id -1, .* is it the tokenizer of this model"),
            ([[1], []], {}, "prompt 1"),
            (["a text"], {}, "prompt 0 is a text, which needs a tokenizer"),
            ([[1]], {"attention_mask": torch.ones(1, 1)}, "attention_mask is for prompts in one"),
            ([[1]], {"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
            ([[1]], {"batch_size": 2.0}, r"batch_size must be a whole number of at least 1, got 2\.0"),
            ([[1]], {"batch_size": True}, "batch_size must be a whole number of at least 1, got True"),
            ([[1]], {"kernel": "fast"}, "kernel must be auto, .*; got 'fast'"),
            ([[1]], {"kernel": "flash_attn"}, "kernel='flash_attn' cannot be used: .*; kernel='auto' takes one"),
            ([[1]], {"num_beams": 2}, "num_beams"),
            ([[1]], {"max_new_token": 2}, "max_new_tokens"),
            ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
            ([[1, 2, 3]], {"max_new_tokens": None, "max_length": 3}, "prompt 0"),
            ([[1]], {"stop_strings": "x"}, "stop_strings need the model's tokenizer"),
            ([[1]], {"logits_processor": 3}, "logits_processor"),
            ([[1]], {"cache": True}, "cache: expected a RadixCache, or None to keep nothing, got bool"),
            ([[1]], {"tokenizer": "gpt2"}, "tokenizer: expected the model's tokenizer, got str"),
            ([[1]], {"generation_config": {"top_k": 3}}, "generation_config: expected a GenerationConfig, got dict"),
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
