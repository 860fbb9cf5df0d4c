"""What a chat template reads and renders, found by its source and by trying it; and whether it rewrites history.

A template rewrites history if it renders an assistant's turn in another way once others follow it: those of Qwen3,
gpt-oss and DeepSeek drop its thinking. With `split_turns: true` every turn is trained as the model writes it; in a
whole chat earlier turns are trained in a rendering that the model never writes.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from radixtrain.data.conversation import Conversation
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from radixtrain.data.files.sources import Row, UnreadRow

logger = logging.getLogger(__name__)

TURNS_LOOKED_AT = 16
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
MARK = "the word of the developer"
DIRECTIVES = (*"aAbBcdHIjmMpSUwWxXyY", "-d", "-m")  # of strftime
WARNING = (
    "split_turns: false: the template drops the thinking of earlier turns, or else renders them in another way once "
    "others follow: they are trained in a rendering that never occurs at inference; split_turns: true trains every "
    "turn as it is"
)


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the variables that the chat template reads; None if it has none or cannot be parsed."""
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
    trees = (environment.parse(source) for source in _sources(tokenizer))
    try:
        return frozenset().union(*map(meta.find_undeclared_variables, trees))
    except (jinja2.TemplateError, RecursionError):
        return None  # rendering says what is wrong with it


def template_words(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return what the chat template takes from objects, `.KEY`, `['KEY']` or `get('KEY')`: it reads no other keys."""
    return frozenset(re.findall(r"""(?:\.|\[['"]|get\(['"])(\w+)""", " ".join(_sources(tokenizer))))


def _sources(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    templates = tokenizer.chat_template
    return [*templates.values()] if isinstance(templates, dict) else [templates or ""]


def with_date(template: str, day: datetime) -> str:
    """Define `strftime_now` in the template, so that it returns this day.

    transformers gives a template only its own functions, whose day is today; so this one replaces each directive.
    """
    known = "".join(f" | replace('%{each}', {json.dumps(day.strftime(f'%{each}'))})" for each in DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{known} }}}}{{%- endmacro -%}}{template}"


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the date, as those of Llama 3 and gpt-oss do."""
    return "strftime_now" in "".join(_sources(tokenizer))


def unread_variable(kwargs: dict[str, Any], variables: frozenset[str] | None) -> str:
    """Say what is wrong with `chat_template_kwargs`: a variable that the template does not read would change nothing.

    variables: from `template_variables`. Empty if all of them are read.
    """
    unread = [name for name in kwargs if variables is not None and name not in variables | GIVEN]
    if not unread:
        return ""
    meant = did_you_mean(unread[0], sorted((variables or frozenset()) - GIVEN), "; remove it")
    return f"chat_template_kwargs: the chat template reads no variable {unread[0]!r}{meant}"


def renders_developer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template renders a turn of the role developer. Qwen3's leaves it out."""
    messages = [{"role": "developer", "content": MARK}, {"role": "user", "content": "Hello."}]
    try:
        return MARK in str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program and may raise anything
        return False


def rewrites_history(encoder: Any, row: Row | UnreadRow) -> bool:
    """Return whether a chat of this row, up to one of the assistant's turns, is not how the whole chat begins.

    encoder: a `ChatEncoder`.

    Tries only the first turns, each with all before it. What a template writes after the text of the turn, such as
    its end-of-turn token, does not count. False for a row that is not a chat, or of which no turn can be rendered with
    the prompt that it has at inference.
    """
    try:
        chats = encoder.chats(row, completions=False)
        return any(_is_rewritten(chat, encoder.tokenize.special_tokens) for chat in chats)
    except DataError:
        return False


def warn_of_rewritten_history(encoder: Any, rows: Iterable[Row | UnreadRow]) -> None:
    """Log one line if whole chats are trained and the template rewrites the history of one of these rows."""
    trains_whole_chats = encoder.assistant_only_loss and not encoder.split_turns
    if trains_whole_chats and any(rewrites_history(encoder, row) for row in rows):
        logger.warning(WARNING)


def warn_of_endless_turns(encoder: Any, rows: Iterable[Row | UnreadRow], stops: Iterable[int]) -> None:
    """Log one line if the last turns of these chats are trained to end where no generation stops.

    encoder: a `ChatEncoder`. stops: ids at which the model stops generating.
    """
    known, endings = {*stops}, Counter[int]()
    for row in rows if encoder.assistant_only_loss else ():
        with suppress(DataError):
            ends = [(chat, turn) for chat in encoder.chats(row) for turn in chat.assistant_turns()[-1:]]
            for chat, turn in ends:
                prompt, target = chat.prompt_and_target(turn, turn + 1)
                [sample] = encoder.tokenize([Draft(prompt, target, chat.where, "turn")])
                endings[int(sample.input_ids[-1])] += 1
    endless = Counter({token: number for token, number in endings.items() if token not in known})
    if known and endless:
        last, stop = (encoder.tokenizer.decode([token]) for token in (endless.most_common(1)[0][0], min(known)))
        is_end = last in encoder.tokenize.special_tokens  # GLM's answers end in what they say, maybe in a full stop
        add = ", or add the token to eos_token_id in the model's generation_config.json" if is_end else ""
        logger.warning(
            "%d of the last turns of %d chats are trained to end in %r, where generation does not stop (it does at %r "
            "...): after its answer the model will continue; set chat_template_path to a template that ends turns with "
            "such a token%s",
            *(endless.total(), endings.total(), last, stop, add),
        )


def warn_of_likely_mistakes(encoder: Any, rows: Iterable[Row | UnreadRow]) -> None:
    """Log one line, with a count, for each thing that is trained as it is and is seldom intended.

    encoder: a `ChatEncoder`.
    """
    found, looked_at = Counter[str](), [*rows]
    for row in looked_at:
        with suppress(DataError):
            found.update({kind for chat in encoder.chats(row) for kind in _mistakes_of_chat(chat)})
            found.update(
                {kind for draft in encoder.drafts(row) for kind in _mistakes_of_text(draft, encoder.tokenizer)}
            )
    for kind, number in found.items():
        logger.warning("%d of %d rows %s", number, len(looked_at), kind)


def _mistakes_of_chat(chat: Conversation) -> Iterator[str]:
    tools = chat.template_kwargs.get("tools") or []
    if any("name" in tool and "function" not in tool for tool in tools):
        yield "list tools as {name, ...}: so does the prompt; a server's has {type: function, function: {name, ...}}"
    if any("tool_calls" in message for message in chat.messages) and not tools:
        yield "call tools and have no `tools`: the prompt does not list them, but at inference it will"
    roles = [each["role"] for each in chat.messages]
    if "assistant" in roles and not {"user", "tool"} & {*roles[: roles.index("assistant")]}:
        yield "begin with an answer: it is learned as what the model says of itself, before anybody asks"
    calls = [call["function"] for each in chat.messages for call in each.get("tool_calls", ())]
    if any(None in call["arguments"].values() for call in calls):
        yield "call tools with nulls, which are learned: leave out those that a table has put there, as datasets does"


def _mistakes_of_text(draft: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    bos = tokenizer.bos_token
    is_written = bos and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if is_written and getattr(draft, "form", "") == "plain" and f"{draft.prompt}{draft.target}".startswith(bos):
        yield f"are text that begins with {bos}, which the tokenizer writes too: it is there twice; leave it out"


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
