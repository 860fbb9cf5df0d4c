"""What a chat template reads and renders, found by its source and by trying it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixtrain.errors import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["renders_developer", "template_variables", "unread_variable"]

GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
MARK = "the word of the developer"


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """The variables that the chat template reads; None if it has none or cannot be parsed."""
    import jinja2
    from jinja2 import meta, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """`{% generation %}`, which Hugging Face adds to Jinja."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = jinja2.Environment(extensions=[loopcontrols, Generation])
    templates = tokenizer.chat_template
    sources = templates.values() if isinstance(templates, dict) else [templates or ""]
    try:
        return frozenset().union(*(meta.find_undeclared_variables(environment.parse(source)) for source in sources))
    except (jinja2.TemplateError, RecursionError):
        return None  # rendering says what is wrong with it


def unread_variable(kwargs: dict[str, Any], variables: frozenset[str] | None) -> str:
    """What is wrong with `chat_template_kwargs`: one that the template does not read would change nothing.

    variables: from `template_variables`. Empty if all of them are read.
    """
    unread = [name for name in kwargs if variables is not None and name not in variables | GIVEN]
    if not unread:
        return ""
    meant = did_you_mean(unread[0], sorted((variables or frozenset()) - GIVEN), "; remove it")
    return f"chat_template_kwargs: the chat template reads no variable {unread[0]!r}{meant}"


def renders_developer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template renders a turn of the role developer. Qwen3's leaves it out."""
    messages = [{"role": "developer", "content": MARK}, {"role": "user", "content": "Hello."}]
    try:
        return MARK in str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program and may raise anything
        return False
