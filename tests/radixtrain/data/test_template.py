"""What a chat template reads: on small ones, and on all that TRL carries."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from tiers import FULL

from radixtrain.data import conversation
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.conversation import Conversation
from radixtrain.data.datamodule import SFTData
from radixtrain.data.files.sources import Row
from radixtrain.data.template import (
    WARNING,
    renders_developer,
    rewrites_history,
    template_variables,
    unread_variable,
    warn_of_rewritten_history,
)
from radixtrain.errors import DataError, UserError


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{{ messages[0].content }}{% if enable_thinking is defined %}x{% endif %}", {"messages", "enable_thinking"}),
        ("{% if not date is defined %}{% set date = 'x' %}{% endif %}{{ date }}", {"date"}),
        (
            "{% for m in messages %}{% generation %}{{ m.x ~ tone }}{% endgeneration %}{% break %}{% endfor %}",
            {"messages", "tone"},
        ),
        ({"default": "{{ a }}", "tool_use": "{{ b }}"}, {"a", "b"}),
        (None, set()),
        ("{% for %}", None),
    ],
)
def test_template_variables(template: Any, variables: set[str] | None) -> None:
    assert template_variables(byte_tokenizer(template)) == variables


def test_unread_variable() -> None:
    """A misspelt one: `tests/radixtrain/data/test_rows.py`."""
    variables = frozenset({"messages", "enable_thinking"})
    assert unread_variable({"enable_thinking": False, "documents": []}, variables) == ""
    assert unread_variable({"date": 1}, variables).endswith("reads no variable 'date'; remove it")
    assert unread_variable({"date": 1}, None) == ""


@FULL
def test_the_templates_of_trl_are_all_understood() -> None:
    trl = pytest.importorskip("trl", reason="carries chat templates of many models: pip install trl")
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(templates) > 20
    for path in templates:
        source = path.read_text(encoding="utf-8")
        found = template_variables(byte_tokenizer(source))
        assert found is not None and "messages" in found, path.name
        assert "enable_thinking" in found or "enable_thinking is defined" not in source, path.name


@pytest.mark.parametrize(
    ("text", "renders"),
    [
        ("{{ messages[0].content }}", True),
        ("{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}", False),
        ("{{ raise_exception('unknown role') }}", False),
    ],
)
def test_renders_developer(text: str, renders: bool) -> None:
    assert renders_developer(byte_tokenizer(text)) is renders


MESSAGES = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]


@pytest.mark.parametrize("expression", ["cycler.__init__.__globals__.os.system('touch x')", "range(10 ** 9)|list"])
def test_a_template_renders_in_a_sandbox(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template failed: (SecurityError|OverflowError|Undef)"):
        Conversation(byte_tokenizer("{{ " + expression + " }}"), MESSAGES, "a.jsonl:7", {}).text()
    assert not any(tmp_path.iterdir())


def test_a_template_that_writes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_CHARACTERS", 1000)
    repeated = byte_tokenizer("{% for i in range(n) %}{{ messages[0].content }}Hi.{% endfor %}")
    assert len(Conversation(repeated, MESSAGES, "a.jsonl:7", {"n": 100}).text()) == 900
    with pytest.raises(
        UserError, match=r"a\.jsonl:7: the chat template .* more than 1,000 characters.*leave this row out"
    ):
        Conversation(repeated, MESSAGES, "a.jsonl:7", {"n": 1000}).text()


DROPPING = """\
{%- for m in messages %}
    {{- '[' + m.role[0] + ']' }}
    {%- if m.role == 'assistant' %}{% generation %}
        {%- if m.reasoning_content and loop.last %}{{- '(' + m.reasoning_content + ')' }}{% endif %}
        {{- m.content + '<end>' }}{% endgeneration %}
    {%- else %}{{- m.content + '<end>' }}{% endif %}
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
    file, template = tmp_path / "chats.jsonl", tmp_path / "dropping.jinja"
    file.write_text(json.dumps(TWO.fields) + "\n", encoding="utf-8")
    template.write_text(DROPPING, encoding="utf-8")
    settings = {"chat_template_path": str(template), "model_name_or_path": str(shop / "model")}
    for _ in range(2):
        caplog.clear()
        data = SFTData(str(file), split_turns=split_turns, **settings)
        with caplog.at_level(logging.WARNING, logger="radixtrain"):
            data.setup("fit")
        assert [len(samples) for samples in data.conversations["train"]] == [2 if split_turns else 1]
        assert caplog.messages.count(WARNING) == (0 if split_turns else 1)
