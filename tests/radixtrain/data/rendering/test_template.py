"""What a chat template reads: on small ones, and on all that TRL carries."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixtrain.data.rendering.template import renders_developer, template_variables, unread_variable


def of(template: Any) -> Any:
    return SimpleNamespace(chat_template=template)


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
    assert template_variables(of(template)) == variables


def test_unread_variable() -> None:
    variables = frozenset({"messages", "enable_thinking"})
    assert unread_variable({"enable_thinking": False, "documents": []}, variables) == ""
    assert unread_variable({"enable_thinkin": False}, variables) == (
        "chat_template_kwargs: the chat template reads no variable 'enable_thinkin', did you mean enable_thinking?"
    )
    assert unread_variable({"date": 1}, variables).endswith("reads no variable 'date'; remove it")
    assert unread_variable({"date": 1}, None) == ""


def test_the_templates_of_trl_are_all_understood() -> None:
    trl = pytest.importorskip("trl", reason="carries chat templates of many models: pip install trl")
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(templates) > 20
    for path in templates:
        source = path.read_text(encoding="utf-8")
        found = template_variables(of(source))
        assert found is not None and "messages" in found, path.name
        assert "enable_thinking" in found or "enable_thinking is defined" not in source, path.name


def test_renders_developer() -> None:
    def rendering(template: Any) -> Any:
        return SimpleNamespace(chat_template=None, apply_chat_template=template)

    assert renders_developer(rendering(lambda messages, tokenize: messages[0]["content"]))
    assert not renders_developer(rendering(lambda messages, tokenize: messages[1]["content"]))
    assert not renders_developer(rendering(lambda messages, tokenize: 1 / 0))
