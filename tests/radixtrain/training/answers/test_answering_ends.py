"""End tokens that a user sets: one, several or none, in both arms."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.data.prompts import Prompt
from radixtrain.training.answers.answer_options import AnswerOptions
from radixtrain.training.answers.answering import answer_prompts


@pytest.mark.parametrize("how", [lambda token: token, lambda token: [token], lambda token: None])
def test_the_arms_agree(shop, how):
    """On the second token of the first answer, which is not an end token of the model."""
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    model = AutoModelForCausalLM.from_pretrained(shop / "model", dtype=torch.float64)
    prompts = [
        Prompt(np.array(tokenizer(text)["input_ids"]), np.zeros(0, dtype=np.int64), "a:1")
        for text in ("Where is the apple?", "Where is it?")
    ]
    free = answer_prompts(model, prompts, tokenizer, AnswerOptions(max_new_tokens=6), dedup=True).answers
    given = {"eos_token_id": how(free[0].token_ids[1])}
    options = AnswerOptions(max_new_tokens=6, generation_kwargs=given)
    shared, ordinary = (answer_prompts(model, prompts, tokenizer, options, dedup).answers for dedup in (True, False))
    assert [each.token_ids for each in shared] == [each.token_ids for each in ordinary]
    assert [each.finish_reason for each in shared] == [each.finish_reason for each in ordinary]
    if given["eos_token_id"] is not None:
        assert shared[0].token_ids == free[0].token_ids[:2] or shared[0].token_ids == free[0].token_ids[:1]
        assert shared[0].finish_reason == "stop"
