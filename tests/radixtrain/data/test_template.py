"""What a chat template reads: on small ones, and on all that TRL carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixtrain.data import conversation
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.conversation import Conversation
from radixtrain.data.datamodule import SFTData
from radixtrain.data.files.sources import Row
from radixtrain.data.template import REWRITTEN, warn_of_mistakes
from radixtrain.errors import DataError, UserError
from tests.support.batches import byte_tokenizer
from tests.support.runs import write_rows

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


TOLD = f"1 of 1 rows {REWRITTEN}"
REWRITES = [
    # template, row, whether the template rewrites its history
    (DROPPING, TWO, True),
    (DROPPING, FOLLOWED, True),
    (DROPPING, ONE, False),
    (DROPPING, PLAIN, False),
    (KEEPING, TWO, False),
    (KEEPING + EOS_AT_THE_END, TWO, False),
    (DROPPING + EOS_AT_THE_END, TWO, True),
    (DROPPING, Row({"text": "hi"}, "a.jsonl:1"), False),
    (DROPPING, Row({"messages": 7}, "a.jsonl:1"), False),
]


@pytest.mark.parametrize(("template", "chat", "rewrites"), REWRITES)
def test_history_that_is_rewritten_is_told(
    template: str, chat: Row, rewrites: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ({"split_turns": False}, {}, {"split_turns": False, "assistant_only_loss": False}):
        caplog.clear()
        warn_of_mistakes(encoder(template, **options), [chat], set())
        assert (TOLD in caplog.messages) == (rewrites and options == {"split_turns": False})


def test_fit_says_it_before_it_tokenises(shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokenised rows are cached, so the second start reads none but these few."""
    file, template = tmp_path / "chats.jsonl", tmp_path / "dropping.jinja"
    write_rows(file, [TWO.fields])
    template.write_text(DROPPING, encoding="utf-8")
    settings = {"chat_template_path": str(template), "model_name_or_path": str(shop / "model"), "split_turns": False}
    for _ in range(2):
        caplog.clear()
        data = SFTData(str(file), **settings)
        data.setup("fit")
        assert [len(samples) for samples in data.conversations["train"]] == [1]
        assert caplog.messages.count(TOLD) == 1
