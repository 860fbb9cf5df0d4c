"""One conversation as the tokenizer's chat template renders it, with proof that the template leaves nothing out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixtrain.data.files.rows import check_encodable
from radixtrain.data.messages import THOUGHTS
from radixtrain.errors import DataError, UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 1 << 28  # of a rendered chat; one of a million tokens has 4 million
RESERVED = {"messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "padding"}
RESERVED |= {"conversation", "truncation", "max_length", "return_dict", "return_tensors"}  # of apply_chat_template
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\b")
FIX = "set chat_template_path to a template"
ALIKE = ", or enable_thinking in data.chat_template_kwargs"
FIX_MARKERS = f"set split_turns: true, or {FIX} with generation markers"


@dataclass(frozen=True)
class Conversation:
    """Checked messages and the chat template that renders them.

    messages: as `check_messages` returns them.
    template_kwargs: variables of the template: `tools`, `documents`, `enable_thinking` and others that it reads.
    drops_thinking: whether a turn whose thinking the template leaves out is trained without it.
    template: replaces the tokenizer's own.

    Every method raises DataError if the template cannot render the messages, and UserError if there is no usable
    template, or if it writes more than `MAX_CHARACTERS`. Templates run in transformers' sandbox: no file, no import.
    """

    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, Any]]
    where: str
    template_kwargs: dict[str, Any]
    drops_thinking: bool = False
    template: str | None = None

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer has no chat template; {FIX}, or use rows with prompt/completion or text")
        if taken := sorted(RESERVED & self.template_kwargs.keys()):
            reason = f"chat_template_kwargs: {', '.join(taken)} cannot be set; expected variables of the template"
            raise DataError(self.where, reason)

    def assistant_turns(self) -> list[int]:
        """List the indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def has_markers(self) -> bool:
        """Return whether the template encloses what the assistant writes in `{% generation %}` markers."""
        template = self.tokenizer.get_chat_template(None, self.template_kwargs.get("tools"))
        return GENERATION_MARKER.search(template) is not None

    def text(self) -> str:
        """Render the whole conversation."""
        return self._checked(self.messages, self.render(self.messages))

    def prompt(self) -> str:
        """Render what the model reads before it answers: the whole conversation and the generation prompt."""
        return self._checked(self.messages, self.render(self.messages, add_generation_prompt=True))

    def prompt_and_target(self, start: int, end: int) -> tuple[str, str]:
        """Render what the model reads before message `start`, and what it should write up to message `end`.

        The prompt is rendered from only `messages[:start]`, as at inference, so it ends in the generation prompt.
        Templates render a turn differently when others follow (Qwen3 drops earlier thinking), so `messages[end:]` are
        not rendered. If the turn itself has the template drop the thinking of those before it (gpt-oss, in a chain of
        calls), it is read beside them without their thinking; the prompt keeps it, as at inference.
        """
        if start == 0:
            reason = "turn 1 is the assistant's, with no prompt before it"
            raise DataError(self.where, f"{reason}; begin with another turn")
        answers = self.messages[start]["role"] == "assistant"
        prompt = self.render(self.messages[:start], add_generation_prompt=answers)
        full = self._checked(self.messages[:end], self.render(self.messages[:end]))
        shown = prompt if full.startswith(prompt) else self._prompt_without_thinking(start, answers)
        if not full.startswith(shown):
            reason = f"the chat template renders the prompt of turn {start + 1} differently with and without its answer"
            at = next((i for i, pair in enumerate(zip(prompt, full, strict=False)) if len({*pair}) == 2), len(full))
            found = f"{full[at : at + 30]!r} and {prompt[at : at + 30]!r}"
            raise DataError(self.where, f"{reason} ({found}); {FIX} that renders both alike{ALIKE}")
        target = full[len(shown) :]
        begun = THINK_END if prompt.rstrip().endswith(THINK_END) else ""  # the prompt has closed the thinking block
        self.check_turns(f"{begun}{target}", range(start, end), thinking_from=start)
        return prompt, target

    def _prompt_without_thinking(self, start: int, answers: bool) -> str:
        return self.render([without_thinking(each) for each in self.messages[:start]], add_generation_prompt=answers)

    def check_turns(self, text: str, turns: Iterable[int], thinking_from: int | None = None) -> None:
        """Raise DataError if their rendering lacks a part of what the assistant says or calls in these turns.

        thinking_from: the first whose thinking has to be there too; by default the last message, since templates drop
            that of earlier ones (`template.py` warns of it).
        """
        first = len(self.messages) - 1 if thinking_from is None else thinking_from
        for turn in turns:
            message = self.messages[turn]
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            if lost := lost_part(message, text, turn >= first and not self.drops_thinking):
                fix = (
                    "put the thinking into reasoning_content" if lost.startswith("writes") else f"{FIX} that renders it"
                )
                other = ", or data.on_unrendered: drop to train without it" if "the thinking" in lost else ""
                raise DataError(self.where, f"the chat template {lost} in turn {turn + 1}; {fix}{other}")

    def tokens_and_mask(self) -> tuple[list[int], list[int]]:
        """Return the conversation's token ids, and 1 for each inside the template's `{% generation %}` markers."""
        self.text()
        encoding = self._apply(self.messages, return_dict=True, return_assistant_tokens_mask=True)
        if not any(encoding["assistant_masks"]):
            raise DataError(self.where, f"the chat template's generation markers mark no token; {FIX_MARKERS}")
        ids, mask = encoding["input_ids"], encoding["assistant_masks"]
        marked: Any = self.tokenizer.decode(
            [token for token, is_marked in zip(ids, mask, strict=True) if is_marked], clean_up_tokenization_spaces=False
        )
        self.check_turns(marked, self.assistant_turns())
        return ids, mask

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Render any messages with these variables, unchecked."""
        text: str = self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return text

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        import jinja2

        try:
            options = {"chat_template": self.template, **options, **self.template_kwargs}
            rendered = self.tokenizer.apply_chat_template(messages, **options)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid at its line {error.lineno}: {error.message}") from error
        except Exception as error:  # a template is a program and may raise anything
            plain = [_plain(message) for message in messages]
            if plain != messages:  # DeepSeek-V3's takes no others
                return self._apply(plain, **options)
            reason = f"the chat template failed: {type(error).__name__}: {first_line(error)}"
            raise DataError(self.where, reason) from error
        if isinstance(rendered, str) and len(rendered) > MAX_CHARACTERS:
            whose = f"the chat template (chat_template_path, or that of {self.tokenizer.name_or_path})"
            reason = f"{whose} makes more than {MAX_CHARACTERS:,} characters of text"
            raise UserError(f"{self.where}: {reason}; {FIX} that writes less, or leave this row out")
        return rendered

    def _checked(self, messages: list[dict[str, Any]], text: str) -> str:
        check_encodable(text, self.where)
        place = 0
        for name, content in self._must_occur(messages):
            as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # as some templates print a tool's result
            tries = ((form, start) for start in (place, 0) for form in (content, as_json))
            place = next((found for each in tries if (found := text.find(*each)) >= 0), -1)
            if place < 0:
                raise DataError(self.where, f"the chat template dropped {name}; {FIX} that renders it")
        return text

    def _must_occur(self, messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        for tool in self.template_kwargs.get("tools") or ():
            yield f"the tool {_function_name(tool)!r}", _function_name(tool)
        for n, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                yield f"turn {n} (role {message['role']!r})", message["content"].strip()
            for call in message.get("tool_calls") or ():
                yield f"turn {n}'s call of the tool {_function_name(call)!r}", _function_name(call)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Copy a message with the arguments of its tool calls as JSON text, and with a content, empty if it has none."""
    calls = [_as_text(call) for call in message.get("tool_calls") or ()]
    return {"content": "", **message, "tool_calls": calls} if calls else message


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    as_text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    return call | {"function": function | {"arguments": as_text}}


def text_of(fields: dict[str, Any], name: str, where: str) -> str:
    """Return the text of a row's field. Raises DataError if it is not text that a tokenizer can read."""
    if not isinstance(fields[name], str):
        raise DataError(where, f"{name}: expected text, found {type(fields[name]).__name__}")
    check_encodable(fields[name], where)
    return fields[name]


def _function_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name") or tool.get("type", ""))


# What a template leaves out of a turn

Message = dict[str, Any]

THINK_TAG = re.compile("</?think>")
THINK_START, THINK_END = "<think>", "</think>"
ESCAPES = re.compile(r"""\\+[nrt]|[\s\\"']""")  # what some templates escape in arguments, and others in part (LFM2's)


def lost_part(message: Message, text: str, with_thinking: bool = True) -> str:
    """Name a part of an assistant's turn that the template writes wrongly, for an error; empty if it writes all.

    message: as `check_messages` returns it. text: the rendering of the turn.
    with_thinking: whether its thinking has to be there too.
    """
    content = message.get("content") or ""
    before, _, spoken = content.rpartition(THINK_END)
    thoughts = {f"the thinking ({name})": message[name] for name in THOUGHTS if name in message}
    thoughts |= {"the thinking before </think>": before}
    thinks = before or content.lstrip().startswith(THINK_START)  # an answer that was cut off has no end of it
    if thinks and text.count(THINK_END) > content.count(THINK_END):
        return "writes a block of thinking of its own before the <think> in the text"
    parts = {**(thoughts if with_thinking else {}), "the text": spoken}
    lost = next((name for name, part in parts.items() if not _holds(text, THINK_TAG.split(part))), "")
    lost = lost or _lost_call(message.get("tool_calls") or (), text)
    return f"leaves out {lost}" if lost else ""


def without_thinking(message: Message) -> Message:
    """Copy the message without its thinking."""
    said = {name: value for name, value in message.items() if name not in THOUGHTS}
    spoken = (said.get("content") or "").rpartition(THINK_END)[2]
    return said | {"content": spoken.lstrip()} if THINK_END in (said.get("content") or "") else said


def _lost_call(calls: Any, text: str) -> str:
    """Name the first call whose name does not follow that of the one before, or one of whose arguments is missing."""
    place = 0
    for number, call in enumerate(calls, start=1):
        function = call["function"]
        what = f"call {number} (of the tool {function['name']!r})"
        place = text.find(function["name"], place)
        if place < 0:
            return what
        place += len(function["name"])
        for value in _leaves(function["arguments"]):
            if not _holds(text, [value]) and ESCAPES.sub("", value) not in ESCAPES.sub("", text):
                return f"{value[:40]!r} in {what}"
    return ""


def _leaves(value: object) -> Iterator[str]:
    """Yield names, texts and numbers of the arguments, but not true, false and null, which templates spell freely."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)


def _holds(text: str, pieces: list[str]) -> bool:
    """Return whether the pieces occur in this order, each in one of its spellings."""
    place = 0
    for piece in filter(None, map(str.strip, pieces)):
        found = (text.find(form, place) for form in _spellings(piece))
        place = next((at for at in found if at >= 0), -1)
        if place < 0:
            return False
    return True


def _spellings(piece: str) -> Iterator[str]:
    """Spell a text as it is, in JSON, in JSON within JSON, and as Python prints it."""
    yield piece
    for ascii_only in (False, True):
        once = json.dumps(piece, ensure_ascii=ascii_only)[1:-1]
        yield once
        yield json.dumps(once, ensure_ascii=ascii_only)[1:-1]
    yield repr(piece)[1:-1]
