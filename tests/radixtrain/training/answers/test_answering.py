"""Answers of both arms, in float64: the same, and nothing of the process is changed."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from radixtrain.data.prompts import Prompt
from radixtrain.errors import UserError
from radixtrain.hf.share import share_prefixes
from radixtrain.training.answers import predictions
from radixtrain.training.answers.answering import AnswerOptions, answer_prompts, check_answering
from radixtrain.training.answers.predictions import PredictedAnswers
from radixtrain.verification.oracle import float64_arithmetic

QUESTIONS = [
    "Where is the apple?",
    "Where is the pear?",
    "Where is it?",
    "Shelf one, Shelf two.",
    "Where is the apple?",
]


@pytest.fixture(autouse=True)
def in_float64():
    with float64_arithmetic():
        yield


@pytest.fixture(scope="module")
def tokenizer(shop):
    return AutoTokenizer.from_pretrained(shop / "model")


@pytest.fixture
def model(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model", dtype=torch.float64)


@pytest.fixture
def prompts(tokenizer):
    ids = [np.array(tokenizer(f"You name the shelf of a thing. {each}")["input_ids"]) for each in QUESTIONS]
    return [Prompt(each, each[:0], f"a:{number}") for number, each in enumerate(ids, start=1)]


def answers(model, prompts, tokenizer, dedup, **options):
    found = answer_prompts(model, prompts, tokenizer, AnswerOptions(**options), dedup, logprobs=True)
    assert found.num_prompt_tokens == sum(len(prompt.token_ids) for prompt in prompts) and found.seconds > 0
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "batch_size": 2},
        {"max_new_tokens": 6, "generation_kwargs": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}},
        {"max_new_tokens": 4, "generation_kwargs": {"min_new_tokens": 4}},
    ],
)
def test_both_arms_agree(model, tokenizer, prompts, options):
    ordinary = answers(model, prompts, tokenizer, dedup=False, **options)
    shared = answers(share_prefixes(model), prompts, tokenizer, dedup=True, **options)
    for one, other in zip(shared.answers, ordinary.answers, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-11)
    assert shared.num_computed_tokens < ordinary.num_computed_tokens >= ordinary.num_prompt_tokens


def test_both_arms_end_where_they_should(model, tokenizer, prompts):
    """An end token of the config or of the call, none, and a stop string: those that the free answer holds."""
    free = answers(model, prompts, tokenizer, dedup=False, max_new_tokens=8).answers[0]
    assert len(free.token_ids) == 8 and free.finish_reason == "length"
    end = next(token for token in free.token_ids[2:] if token not in free.token_ids[:2])
    words = [tokenizer.decode(token) for token in free.token_ids]
    place = next(n for n in range(2, 8) if words[n].isascii() and words[n] not in "".join(words[:n]))
    for arm, prepare in ((False, lambda it: it), (True, share_prefixes)):
        model.generation_config.eos_token_id = end
        [found] = answers(prepare(model), prompts[:1], tokenizer, dedup=arm, max_new_tokens=8).answers
        assert found.token_ids == free.token_ids[: free.token_ids.index(end) + 1] and found.finish_reason == "stop"
        model.generation_config.eos_token_id = None
        for given, reason in ((end, "stop"), ([end], "stop"), (None, "length")):
            kwargs = {"max_new_tokens": 8, "generation_kwargs": {"eos_token_id": given}}
            [same] = answers(model, prompts[:1], tokenizer, dedup=arm, **kwargs).answers
            assert same.token_ids == (free.token_ids if given is None else found.token_ids)
            assert same.finish_reason == reason
        kwargs = {"max_new_tokens": 8, "generation_kwargs": {"stop_strings": [words[place]]}}
        stopped = answers(model, prompts, tokenizer, dedup=arm, **kwargs).answers[0]
        assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: place + 1]


@pytest.mark.parametrize("dedup", [True, False])
def test_draws_depend_on_the_seed_only(model, tokenizer, prompts, dedup):
    def drawn(seed):
        options = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "seed": seed}
        return [each.token_ids for each in answers(model, prompts, tokenizer, dedup, **options).answers]

    first = drawn(1)
    torch.rand(1)
    assert drawn(1) == first != drawn(2)


def test_a_model_with_a_recurrent_state_is_refused_before_it_runs(tiny_hybrid, tokenizer):
    prompts = [Prompt(np.arange(1, 9), np.arange(0), "a:1")]
    model = tiny_hybrid("Qwen3.5")
    with pytest.raises(UserError, match=r"Qwen3_5ForCausalLM"):
        check_answering(model, tokenizer, prompts, AnswerOptions(max_new_tokens=2), dedup=True)


# What `predict` writes, batch by batch.


@pytest.fixture
def predicted():
    predicted = PredictedAnswers()
    predicted.options = AnswerOptions(max_new_tokens=2)
    return predicted


def test_records_are_those_of_a_single_batch_and_the_shared_beginning_is_computed_once(
    predicted, model, tokenizer, prompts
):
    prompts = prompts[:3]  # no two are equal
    whole = PredictedAnswers()
    whole.options = predicted.options
    expected = whole.records(model, prompts, tokenizer, dedup=True)
    found = [record for each in prompts for record in predicted.records(model, [each], tokenizer, dedup=True)]
    assert [each["row"] for each in found] == [each.where for each in prompts]
    for one, other in zip(found, expected, strict=True):
        assert one == {**other, "logprob": pytest.approx(other["logprob"], rel=1e-11)}
    assert predicted.num_computed_tokens == whole.num_computed_tokens


def test_prompts_that_do_not_fit_twice_leave_the_cache_alone(predicted, model, tokenizer, prompts, monkeypatch):
    monkeypatch.setattr(predictions, "MAX_TOKENS", 2 * max(len(each.token_ids) for each in prompts) - 1)
    assert len(predicted.records(model, prompts, tokenizer, dedup=True)) == len(prompts)
    assert predicted.cache.num_tokens == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.5}, "temperature 0.5 is read only with evaluate_generation.do_sample: true"),
        ({"generation_kwargs": {"do_sample": True}}, "do_sample is a key of its own, evaluate_generation.do_sample"),
        ({"generation_kwargs": {"num_return_sequences": 2}}, "must be 1, since a row gets one answer"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(UserError, match=f"^evaluate_generation.*{message}"):
        AnswerOptions(**given)


def test_the_fields_of_a_generation_config(shop):
    """An end of turn that only the chat template knows ends an answer too."""
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    turn, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    tokenizer.eos_token = "<|endoftext|>"
    model = nn.Module()
    model.generation_config = GenerationConfig(eos_token_id=[end, 99])
    prompts = [Prompt(np.array([5]), np.array([6, turn]), "a:1")]
    options = AnswerOptions(do_sample=True, temperature=0.5, generation_kwargs={"top_p": 0.9})
    assert options.fields(tokenizer, model, prompts) == {
        **{"max_new_tokens": 256, "do_sample": True, "temperature": 0.5, "top_p": 0.9},
        "eos_token_id": sorted([end, turn, 99]),
    }
    assert options.fields(tokenizer, nn.Module(), prompts)["eos_token_id"] == sorted([end, turn])


def test_an_answer_needs_an_end(shop):
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    tokenizer.eos_token, tokenizer.chat_template = None, None
    with pytest.raises(UserError, match="neither the model nor its tokenizer has an end-of-sequence token"):
        AnswerOptions().fields(tokenizer, nn.Module(), [])
