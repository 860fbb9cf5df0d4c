"""Rows of which only the end is read: one sequence each, with the tokens that an ordinary loop would give the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from radixtrain.data.chat import UnlabelledEncoder
from radixtrain.data.files.sources import Row
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError

SYSTEM = {"role": "system", "content": "Saw?"}
USER = {"role": "user", "content": "Where is the saw?"}
ANSWER = {"role": "assistant", "content": "Shelf two."}
BRIEF = {"enable_thinking": False}


@pytest.fixture
def tokenizer(shop: Path) -> Any:
    return AutoTokenizer.from_pretrained(shop / "model")


def encoded(tokenizer: Any, fields: dict[str, Any], **options: Any) -> list[int]:
    """The tokens of the row's only sample."""
    report = EncodeReport()
    [[sample]] = UnlabelledEncoder(tokenizer, **options).encode_all([Row(fields, "a.jsonl:1")], report=report)
    assert len(sample.labels) == len(sample.input_ids) and str(report) == "1 rows, 1 samples"
    return sample.input_ids.tolist()


def rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


ASKING = [
    # a row, its messages, and variables of the template: it ends with the generation prompt
    ({"messages": [SYSTEM]}, [SYSTEM], {}),
    ({"messages": [USER, ANSWER | {"loss": 0}, USER], "label": 0}, [USER, ANSWER, USER], {}),  # it may say anything
    ({"prompt": [USER]}, [USER], {}),
    ({"prompt": [USER, ANSWER], "completion": [USER]}, [USER, ANSWER, USER], {}),
    ({"question": "Where is the saw?"}, [USER], {}),
    ({"instruction": "Where is", "input": "the saw?"}, [{"role": "user", "content": "Where is\nthe saw?"}], {}),
    ({"messages": [USER], "chat_template_kwargs": BRIEF}, [USER], BRIEF),
]


@pytest.mark.parametrize(("fields", "messages", "given"), ASKING)
def test_what_asks_ends_with_the_generation_prompt(tokenizer: Any, fields: Any, messages: Any, given: Any) -> None:
    assert encoded(tokenizer, fields) == rendered(tokenizer, messages, **given)


def test_an_answered_chat_is_one_sequence_to_its_end_of_turn(tokenizer: Any) -> None:
    messages = [USER, ANSWER, USER, ANSWER]
    expected = rendered(tokenizer, messages)
    end = [place for place, token in enumerate(expected) if token == tokenizer.eos_token_id][3]
    assert encoded(tokenizer, {"messages": messages}) == expected[: end + 1]


def test_text_is_what_the_tokenizer_makes_of_it(tokenizer: Any) -> None:
    """An embedding model's may add an end token, which is then the last one; a prompt never gets one."""
    plain, completion = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Where?", " Here."))
    assert encoded(tokenizer, {"text": "Where?"}) == encoded(tokenizer, {"prompt": "Where?"}) == plain
    end = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    single = {"single": "$A <|endoftext|>", "special_tokens": [end]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**single)
    assert encoded(tokenizer, {"text": "Where?"}) == [*plain, end[1]] == tokenizer("Where?")["input_ids"]
    assert encoded(tokenizer, {"prompt": "Where?"}) == plain
    answered = encoded(tokenizer, {"prompt": "Where?", "completion": " Here."})
    assert answered == [*plain, *completion, tokenizer.eos_token_id]
    assert encoded(tokenizer, {"input_ids": [5], "labels": [-100]}) == [5]


def test_what_is_refused(tokenizer: Any) -> None:
    """What is wrong with an answered row, too: `test_rows.py`."""
    with pytest.raises(DataError, match=r"a\.jsonl:1: no token to read; expected a text that is not empty"):
        encoded(tokenizer, {"text": ""})
    with pytest.raises(DataError, match="prompt: expected text, found int"):
        encoded(tokenizer, {"prompt": 7})


@pytest.mark.parametrize("strategy", ["raise", "truncate"])
def test_the_end_is_never_cut(tokenizer: Any, strategy: str) -> None:
    options: dict[str, Any] = {"max_length": 3, "excess_length_strategy": strategy}
    assert encoded(tokenizer, {"input_ids": [5, 6, 7]}, **options) == [5, 6, 7]
    with pytest.raises(DataError, match=r"4 tokens exceed max_length 3; raise max_length or .*: drop, since"):
        encoded(tokenizer, {"input_ids": [5, 6, 7, 8]}, **options)
    dropping = UnlabelledEncoder(tokenizer, max_length=3, excess_length_strategy="drop")
    assert dropping.encode(Row({"input_ids": [5, 6, 7, 8]}, "a.jsonl:1")) == []
