"""Whether a template rewrites earlier turns, and the line in the log."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.datamodule import SFTData
from radixtrain.data.formats import Row
from radixtrain.data.rendering.history import WARNING, rewrites_history, warn_of_rewritten_history

DROPPING = """\
{%- for m in messages %}
    {{- '[' + m.role[0] + ']' }}
    {%- if m.reasoning_content and loop.last %}{{- '(' + m.reasoning_content + ')' }}{% endif %}
    {{- m.content + '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[a]' }}{% endif %}"""
KEEPING = DROPPING.replace(" and loop.last", "")
EOS_AT_THE_END = "{% if not add_generation_prompt %}<eos>{% endif %}"


def encoder(template: str, **options: Any) -> ChatEncoder:
    return ChatEncoder(byte_tokenizer(template, eos="<eos>", special=("<end>", "<eos>")), **options)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def row(*messages: dict[str, Any]) -> Row:
    return Row({"messages": list(messages)}, "a.jsonl:1")


ONE = row(user("hi"), answer("yo", reasoning_content="greet"))
TWO = row(user("hi"), answer("yo", reasoning_content="greet"), user("q"), answer("a"))
FOLLOWED = row(user("hi"), answer("yo", reasoning_content="greet"), user("unanswered"))
PLAIN = row(user("hi"), answer("yo"), user("q"), answer("a"))


@pytest.mark.parametrize(
    ("template", "chat", "rewrites"),
    [
        (DROPPING, TWO, True),
        (DROPPING, FOLLOWED, True),
        (DROPPING, ONE, False),
        (DROPPING, PLAIN, False),
        (KEEPING, TWO, False),
        (KEEPING + EOS_AT_THE_END, TWO, False),
        (DROPPING + EOS_AT_THE_END, TWO, True),
        (DROPPING, Row({"text": "hi"}, "a.jsonl:1"), False),
        (DROPPING, Row({"messages": 7}, "a.jsonl:1"), False),
        (DROPPING, row(answer("yo", reasoning_content="greet"), user("q")), False),
    ],
)
def test_rewrites_history(template: str, chat: Row, rewrites: bool) -> None:
    for split_turns in (True, False):
        assert rewrites_history(encoder(template, split_turns=split_turns), chat) is rewrites


def warned(caplog: pytest.LogCaptureFixture, chat: Row, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="radixtrain"):
        warn_of_rewritten_history(encoder(DROPPING, **options), [PLAIN, chat, TWO])
    return [record.getMessage() for record in caplog.records]


def test_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, TWO, split_turns=False) == [WARNING]
    assert "thinking of earlier turns" in WARNING and "split_turns: true trains every turn as it is" in WARNING
    assert warned(caplog, TWO) == []
    assert warned(caplog, TWO, split_turns=False, assistant_only_loss=False) == []


def test_no_row_is_read_if_turns_are_split() -> None:
    def rows() -> Iterator[Row]:
        raise AssertionError("a row was read")
        yield

    warn_of_rewritten_history(encoder(DROPPING), rows())


@pytest.mark.parametrize("split_turns", [True, False])
def test_fit_says_it_before_it_tokenises(
    split_turns: bool, shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokenised rows are kept, so the second start reads none but these few."""
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(TWO.fields) + "\n", encoding="utf-8")
    for _ in range(2):
        caplog.clear()
        data = SFTData(str(file), split_turns=split_turns, model_name_or_path=str(shop / "model"))
        with caplog.at_level(logging.WARNING, logger="radixtrain"):
            data.setup("fit")
        assert [len(samples) for samples in data.conversations["train"]] == [2 if split_turns else 1]
        assert caplog.messages.count(WARNING) == (0 if split_turns else 1)
