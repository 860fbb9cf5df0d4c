"""The answers of `predict`: what batches share is computed once, and the last line counts it."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.data.prompts import Prompt
from radixtrain.training.answers import predicted_answers
from radixtrain.training.answers.answer_options import AnswerOptions
from radixtrain.training.answers.predicted_answers import PredictedAnswers

QUESTIONS = ("Where is the apple?", "Where is the pear?", "Where is it?")


@pytest.fixture(scope="module")
def tokenizer(shop):
    return AutoTokenizer.from_pretrained(shop / "model")


@pytest.fixture(scope="module")
def model(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model", dtype=torch.float64)


@pytest.fixture
def prompts(tokenizer):
    ids = [np.array(tokenizer(f"You name the shelf of a thing. {each}")["input_ids"]) for each in QUESTIONS]
    return [Prompt(each, np.arange(0), f"rows.jsonl:{line}") for line, each in enumerate(ids, 1)]


@pytest.fixture
def answers():
    answers = PredictedAnswers()
    answers.options = AnswerOptions(max_new_tokens=2)
    return answers


def test_records_are_those_of_a_single_batch_and_the_shared_beginning_is_computed_once(
    answers, model, tokenizer, prompts
):
    whole = PredictedAnswers()
    whole.options = answers.options
    expected = whole.records(model, prompts, tokenizer, dedup=True)
    found = [record for each in prompts for record in answers.records(model, [each], tokenizer, dedup=True)]
    assert [each["row"] for each in found] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    for one, other in zip(found, expected, strict=True):
        assert one == {**other, "logprob": pytest.approx(other["logprob"], rel=1e-12)}
    assert answers.speed.num_computed_tokens == whole.speed.num_computed_tokens


def test_prompts_that_do_not_fit_twice_leave_the_cache_alone(answers, model, tokenizer, prompts, monkeypatch):
    monkeypatch.setattr(predicted_answers, "MAX_TOKENS", 2 * max(len(each.token_ids) for each in prompts) - 1)
    assert len(answers.records(model, prompts, tokenizer, dedup=True)) == 3
    assert answers.cache.num_tokens == 0


def test_the_closing_line(answers, model, tokenizer, prompts):
    for _ in range(2):
        answers.records(model, prompts, tokenizer, dedup=True)
    speed = answers.speed
    assert speed.num_answers == 6 and speed.num_new_tokens == 12
    shape = r"\d\.\d\d tokens of prompts per computed token; [\d.,]+ answers/s, [\d,]+ new tokens/s, \d+ s"
    assert re.fullmatch(shape, str(speed)) and float(str(speed).split()[0]) > 2
