"""What splitting turns costs, against numbers counted by hand. A character is a token."""

from collections.abc import Iterable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row
from radixtrain.report.contents import SplitCost
from radixtrain.report.turns import split_cost

KEEPING = """\
{%- for m in messages %}
    {{- m.role[0] }}
    {%- if m.reasoning_content %}{{- m.reasoning_content + '/' }}{% endif %}
    {{- m.content + '.' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'a' }}{% endif %}"""
DROPPING = KEEPING.replace("if m.reasoning_content", "if m.reasoning_content and loop.last")


def encoder(template: str, **options: Any) -> ChatEncoder:
    letters = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz/?")}
    backend = Tokenizer(models.WordLevel(letters, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken(".")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=".", chat_template=template)
    return ChatEncoder(tokenizer, **options)


def row(*texts: str) -> Row:
    """Questions and answers in turn; what stands before a slash is thinking."""
    messages: list[dict[str, Any]] = []
    for n, text in enumerate(texts):
        thinking, _, content = text.rpartition("/")
        messages.append({"role": "assistant" if n % 2 else "user", "content": content})
        messages[-1] |= {"reasoning_content": thinking} if thinking else {}
    return Row({"messages": messages}, "a.jsonl:1")


def test_a_history_that_is_kept_costs_nothing() -> None:
    """Whole is `uhi.ayo.uq.ab.`, 14 tokens; split is its first 8, and all of it."""
    cost = split_cost(encoder(KEEPING), [row("hi", "yo", "q", "b")])
    assert cost == SplitCost(
        num_conversations=1,
        num_samples=2,
        whole_tokens=14,
        whole_unique=14,
        split_tokens=8 + 14,
        split_unique=14,
        rewrites_history=False,
    )


def test_thinking_that_is_dropped_is_a_branch() -> None:
    """Whole is `uhi.ayo.uq.ab.`; split is `uhi.athink/yo.`, of which 9 are a branch, and `uhi.ayo.uq.ab.`."""
    cost = split_cost(encoder(DROPPING), [row("hi", "think/yo", "q", "b")])
    assert cost == SplitCost(
        num_conversations=1,
        num_samples=2,
        whole_tokens=14,
        whole_unique=14,
        split_tokens=14 + 14,
        split_unique=14 + 9,
        rewrites_history=True,
    )


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_conversations_of_a_step_share(batch_size: int) -> None:
    rows = [row("hi", "yo", "q", answer) for answer in "bcd"]
    cost = split_cost(encoder(KEEPING), rows, batch_size)
    assert cost is not None and cost.num_conversations == 3 and cost.num_samples == 6
    shared = {1: 0, 2: 1, 3: 2}[batch_size] * 12  # `uhi.ayo.uq.a`
    assert cost.whole_unique == cost.split_unique == 3 * 14 - shared


def test_the_settings_of_the_run_do_not_matter() -> None:
    rows = [row("hi", "think/yo", "q", "b")]
    expected = split_cost(encoder(DROPPING), rows)
    assert expected == split_cost(encoder(DROPPING, split_turns=False, max_length=3), iter(rows))


NOTHING: list[tuple[Iterable[Row], dict[str, Any]]] = [
    ([], {}),
    ([row("hi", "yo")], {}),
    ([Row({"text": "hi"}, "a.jsonl:1"), Row({"messages": 7}, "a.jsonl:2")], {}),
    ([row("hi", "yo", "q", "b")], {"assistant_only_loss": False}),
]


@pytest.mark.parametrize(("rows", "options"), NOTHING)
def test_nothing_to_split(rows: Iterable[Row], options: dict[str, Any]) -> None:
    assert split_cost(encoder(KEEPING, **options), rows) is None


def test_rows_that_cannot_be_used_are_left_out() -> None:
    good = row("hi", "yo", "q", "b")
    assert split_cost(encoder(KEEPING), [row("hi", "yo"), good, Row({}, "a.jsonl:3")]) == split_cost(
        encoder(KEEPING), [good]
    )
