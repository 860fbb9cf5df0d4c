"""The templates of the demo and of the one with a tiny Qwen3.5 render as the stock ones."""

from pathlib import Path
from typing import Any

import demo
import pytest
import qwen3_5


def chat_of(text: str) -> list[dict[str, str]]:
    """Turns are separated by `|`, the role from the content by `: `."""
    turns = [turn.split(": ") for turn in text.split("|")]
    return [{"role": role, "content": content} for role, content in turns]


CHATS = [
    chat_of("user: u|assistant: a|user: u|assistant: b"),
    chat_of("system: s|user: u"),
    chat_of("user: u|assistant: <think>\nhm\n</think>\n\na|user: v"),
    chat_of("user: u|assistant: \na|assistant: b"),
    [*chat_of("user: u"), {"role": "assistant", "content": "a", "reasoning_content": "\nhm\n"}],
]
OPTIONS: list[dict[str, bool]] = [{}, {"add_generation_prompt": True}]


@pytest.mark.parametrize(
    ("make", "stock", "thinks"),
    [(demo.train_tokenizer, "qwen3", False), (qwen3_5.tiny_tokenizer, "qwen3_5_nothink", True)],
)
def test_template_renders_as_the_stock_one(make: Any, stock: str, thinks: bool) -> None:
    trl = pytest.importorskip("trl", reason="TRL carries the stock template: pip install -e '.[dev]'")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{stock}.jinja").read_text(encoding="utf-8")
    tokenizer = make(["a", "b"], 300)
    for chat in CHATS:
        for options in [*OPTIONS, {"add_generation_prompt": True, "enable_thinking": thinks}]:
            ours = tokenizer.apply_chat_template(chat, tokenize=False, **options)
            stocks = tokenizer.apply_chat_template(chat, tokenize=False, chat_template=template, **options)
            assert ours == stocks, (chat, options)
