"""Answers, in float64: those of prompts computed one by one, and nothing of the process is changed."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from radixtrain import share_prefixes
from radixtrain.data.prompts import Prompt
from radixtrain.errors import UserError
from radixtrain.settings.commands import AnswerSettings
from radixtrain.training.answers.answering import answer_prompts, check_answering, fields_of_config
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


def answers(model, prompts, tokenizer, **options):
    found = answer_prompts(model, prompts, tokenizer, AnswerSettings(**options), logprobs=True)
    assert found.num_prompt_tokens == sum(len(prompt.token_ids) for prompt in prompts)
    return found


@pytest.mark.parametrize(
    ("recurrent", "options"),
    [
        ("", {"max_new_tokens": 12, "batch_size": 2}),
        ("", {"max_new_tokens": 6, "generation_kwargs": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}}),
        ("Qwen3.5", {"max_new_tokens": 4, "generation_kwargs": {"min_new_tokens": 4}}),
    ],
)
def test_shared_prompts_change_nothing(model, tiny_hybrid, tokenizer, prompts, recurrent, options, caplog):
    """Each answer is that of transformers' own `generate` to the prompt by itself, and so is its log-probability.

    If nothing is shared, a line says so.
    """
    model = tiny_hybrid(recurrent, vocab_size=len(tokenizer)).eval() if recurrent else model
    check_answering(model, tokenizer, prompts, AnswerSettings(**options))
    fields = fields_of_config(AnswerSettings(**options), tokenizer, model, prompts)
    expected = []
    for prompt in prompts:
        ids = torch.tensor(prompt.token_ids)[None]
        row = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **fields)
        with torch.no_grad():
            logits = model(row).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
        tokens = row[0, len(prompt.token_ids) :]
        expected.append((tokens.tolist(), logits.gather(1, tokens[:, None]).sum().item()))
    shared = answers(share_prefixes(model), prompts, tokenizer, **options)
    for one, (tokens, logprob) in zip(shared.answers, expected, strict=True):
        assert one.token_ids == tokens and one.text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert one.finish_reason == ("stop" if tokens[-1] in fields["eos_token_id"] else "length")
        assert one.logprob == pytest.approx(logprob, abs=1e-11)
    assert ("computes each prompt whole" in caplog.text) is bool(recurrent)
    assert (shared.num_computed_tokens == shared.num_prompt_tokens) is bool(recurrent)


def test_answers_end_where_they_should(model, tokenizer, prompts):
    """An end token of the config or of the call, none, and a stop string: those that the free answer holds."""
    free = answers(model, prompts, tokenizer, max_new_tokens=8).answers[0]
    assert len(free.token_ids) == 8 and free.finish_reason == "length"
    end = next(token for token in free.token_ids[2:] if token not in free.token_ids[:2])
    words = [tokenizer.decode(token) for token in free.token_ids]
    place = next(n for n in range(2, 8) if words[n].isascii() and words[n] not in "".join(words[:n]))
    model.generation_config.eos_token_id = end
    [found] = answers(share_prefixes(model), prompts[:1], tokenizer, max_new_tokens=8).answers
    assert found.token_ids == free.token_ids[: free.token_ids.index(end) + 1] and found.finish_reason == "stop"
    model.generation_config.eos_token_id = None
    for given, reason in ((end, "stop"), (None, "length")):
        kwargs = {"max_new_tokens": 8, "generation_kwargs": {"eos_token_id": given}}
        [same] = answers(model, prompts[:1], tokenizer, **kwargs).answers
        assert same.token_ids == (free.token_ids if given is None else found.token_ids)
        assert same.finish_reason == reason
    kwargs = {"max_new_tokens": 8, "generation_kwargs": {"stop_strings": [words[place]]}}
    stopped = answers(model, prompts, tokenizer, **kwargs).answers[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: place + 1]


def test_draws_depend_on_the_seed(model, tokenizer, prompts):
    def drawn(seed):
        options = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "seed": seed}
        return [each.token_ids for each in answers(model, prompts, tokenizer, **options).answers]

    first = drawn(1)
    torch.rand(1)
    assert drawn(1) == first != drawn(2)


def test_what_only_generate_knows_is_an_error_of_the_user(model, tokenizer, prompts):
    with pytest.raises(UserError, match=r"^evaluate_generation: .*top_k"):
        answers(model, prompts, tokenizer, max_new_tokens=2, do_sample=True, generation_kwargs={"top_k": -1})


# What `predict` writes, batch by batch.


@pytest.fixture
def predicted():
    predicted = PredictedAnswers()
    predicted.options = AnswerSettings(max_new_tokens=2)
    return predicted


def test_records_are_those_of_a_single_batch_and_the_shared_beginning_is_computed_once(
    predicted, model, tokenizer, prompts
):
    prompts = prompts[:3]  # no two are equal
    whole = answers(model, prompts, tokenizer, max_new_tokens=2)
    found = [record for each in prompts for record in predicted.records(model, [each], tokenizer)]
    for record, prompt, one in zip(found, prompts, whole.answers, strict=True):
        expected = {
            **{"row": prompt.where, "answer": one.text, "num_tokens": len(one.token_ids)},
            **{"logprob": pytest.approx(one.logprob, rel=1e-11), "finish_reason": one.finish_reason},
        }
        assert (record, [*record]) == (expected, [*expected])
    assert predicted.num_computed_tokens == whole.num_computed_tokens


def test_the_fields_of_a_generation_config(shop):
    """An end of turn that only the chat template knows ends an answer too."""
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    turn, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    tokenizer.eos_token = "<|endoftext|>"
    model = nn.Module()
    model.generation_config = GenerationConfig(eos_token_id=[end, 99])
    prompts = [Prompt(np.array([5]), np.array([6, turn]), "a:1")]
    options = AnswerSettings(do_sample=True, temperature=0.5, generation_kwargs={"top_p": 0.9})
    assert fields_of_config(options, tokenizer, model, prompts) == {
        **{"max_new_tokens": 256, "do_sample": True, "temperature": 0.5, "top_p": 0.9},
        "eos_token_id": sorted([end, turn, 99]),
    }
    assert fields_of_config(options, tokenizer, nn.Module(), prompts)["eos_token_id"] == sorted([end, turn])
    tokenizer.eos_token, tokenizer.chat_template = None, None
    with pytest.raises(UserError, match="neither the model nor its tokenizer has an end-of-sequence token"):
        fields_of_config(options, tokenizer, nn.Module(), [])
