"""What a chat template reads: on small ones, and on all that TRL carries."""

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from tiers import FULL

from radixtrain.data.rendering import conversation
from radixtrain.data.rendering.conversation import Conversation
from radixtrain.data.rendering.template import renders_developer, template_variables, unread_variable
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
