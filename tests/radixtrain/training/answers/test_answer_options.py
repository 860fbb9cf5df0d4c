"""The options of generation: what is refused, and what becomes of them."""

import numpy as np
import pytest
from torch import nn
from transformers import AutoTokenizer, GenerationConfig

from radixtrain.data.prompts import Prompt
from radixtrain.errors import UserError
from radixtrain.training.answers.answer_options import AnswerOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"temperature": 0.5}, "temperature 0.5 is read only with evaluate_generation.do_sample: true"),
        ({"temperature": 0.0, "do_sample": True}, r"temperature must be above 0, got 0\.0"),
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
