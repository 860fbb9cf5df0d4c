"""What a chat template reads and renders, found in its source and by trying it; and rows that are seldom meant."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from radixtrain.data.columns import turns_of
from radixtrain.data.conversation import FIX, Conversation
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from radixtrain.data.files.sources import Row, UnreadRow

logger = logging.getLogger(__name__)

TURNS_LOOKED_AT = 16
GIVEN = {"tools", "documents"}
MARK = "the word of the developer"
DIRECTIVES = (*"aAbBcdHIjmMpSUwWxXyY", "-d", "-m")  # of strftime
REWRITTEN = (
    "are trained whole, and the template drops the thinking of earlier turns, or else renders them in another way once "
    "others follow: this never occurs at inference; split_turns: true trains every turn as it is"
)


def unread_variable(kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Say what is wrong with `chat_template_kwargs`: a variable that the template does not name would change nothing.

    Empty if it names all of them.
    """
    source = _source(tokenizer)
    unread = [name for name in kwargs if name not in GIVEN and not re.search(rf"\b{re.escape(str(name))}\b", source)]
    return f"chat_template_kwargs: the chat template reads no variable {unread[0]!r}; remove it" if unread else ""


def template_words(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return what the chat template takes from objects, `.KEY`, `['KEY']` or `get('KEY')`: it reads no other keys."""
    return frozenset(re.findall(r"""(?:\.|\[['"]|get\(['"])(\w+)""", _source(tokenizer)))


def _source(tokenizer: PreTrainedTokenizerBase) -> str:
    templates = tokenizer.chat_template
    return " ".join(templates.values()) if isinstance(templates, dict) else templates or ""


def with_date(template: str, day: datetime) -> str:
    """Define `strftime_now` in the template, so that it returns this day.

    transformers gives a template only its own functions, whose day is today; so this one replaces each directive.
    """
    known = "".join(f" | replace('%{each}', {json.dumps(day.strftime(f'%{each}'))})" for each in DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{known} }}}}{{%- endmacro -%}}{template}"


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the date, as those of Llama 3 and gpt-oss do."""
    return "strftime_now" in _source(tokenizer)


def renders_developer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template renders a turn of the role developer. Qwen3's leaves it out."""
    messages = [{"role": "developer", "content": MARK}, {"role": "user", "content": "Hello."}]
    try:
        return MARK in str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program and may raise anything
        return False


def warn_of_mistakes(encoder: Any, rows: Iterable[Row | UnreadRow], stops: set[int]) -> None:
    """Log one line, with a count, for each thing that is trained as it is and is seldom intended.

    encoder: a `ChatEncoder`. stops: ids at which the model stops generating.
    """
    found, looked_at = Counter[str](), [*rows]
    for row in looked_at:
        with suppress(DataError):
            found.update({*_mistakes(encoder, encoder.standard(row), stops)})
    for mistake, number in found.items():
        logger.warning("%d of %d rows %s", number, len(looked_at), mistake)


def _mistakes(encoder: Any, row: Row, stops: set[int]) -> Iterator[str]:
    """Say what is seldom intended of a row from `encoder.standard`."""
    turns, tokenizer = turns_of(row.fields), encoder.tokenizer
    if not turns:
        bos, text = tokenizer.bos_token, row.fields.get("text", row.fields.get("prompt"))
        is_written = bos and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        if is_written and str(text).startswith(bos):
            yield f"are text that begins with {bos}, which the tokenizer writes too: it is there twice; leave it out"
        return
    chat = encoder.conversation(turns, row.fields, row.where)
    yield from _mistakes_of_messages(turns, chat.template_kwargs.get("tools") or [])
    trains_whole_chats = encoder.assistant_only_loss and not encoder.split_turns
    if trains_whole_chats and "messages" in row.fields and _is_rewritten(chat, encoder.tokenize.special_tokens):
        yield REWRITTEN
    last = max(chat.assistant_turns(), default=0)
    if stops and last and encoder.assistant_only_loss:
        prompt, target = chat.prompt_and_target(last, last + 1)
        [sample] = encoder.tokenize([Draft(prompt, target, row.where, "turn")])
        if (end := int(sample.input_ids[-1])) not in stops:
            ending, stop = (tokenizer.decode([token]) for token in (end, min(stops)))
            where = f"end in {ending!r}, where generation does not stop (it does at {stop!r} ...)"
            add = "or add the token to eos_token_id in the model's generation_config.json"
            yield f"{where}: after its answer the model will continue; {FIX} that ends turns with such a token, {add}"


def _mistakes_of_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Iterator[str]:
    if any("name" in tool and "function" not in tool for tool in tools):
        yield "list tools as {name, ...}: so does the prompt; a server's has {type: function, function: {name, ...}}"
    calls = [call["function"] for each in messages for call in each.get("tool_calls", ())]
    if calls and not tools:
        yield "call tools and have no `tools`: the prompt does not list them, but at inference it will"
    if any(None in call["arguments"].values() for call in calls):
        yield "call tools with nulls, which are learned: leave out those that a table has put there, as datasets does"
    roles = [each["role"] for each in messages]
    if "assistant" in roles and not {"user", "tool"} & {*roles[: roles.index("assistant")]}:
        yield "begin with an answer: it is learned as what the model says of itself, before anybody asks"


def _is_rewritten(chat: Conversation, special_tokens: tuple[str, ...]) -> bool:
    whole = chat.text()
    turns = (chat.prompt_and_target(turn, turn + 1) for turn in chat.assistant_turns()[:TURNS_LOOKED_AT] if turn)
    return not all(whole.startswith(_without_end(prompt + target, special_tokens)) for prompt, target in turns)


def _without_end(text: str, special_tokens: tuple[str, ...]) -> str:
    """Strip the special tokens and blanks from the end of a text."""
    text = text.rstrip()
    while token := max((token for token in special_tokens if text.endswith(token)), key=len, default=""):
        text = text.removesuffix(token).rstrip()
    return text
