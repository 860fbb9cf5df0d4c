"""Which part of an assistant's turn a chat template has left out.

A turn consists of what the assistant thinks, says and calls. A template writes them as they are, as JSON or as Python
prints them; it may trim their ends, and write the thinking's tags itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from radixtrain.data.rows.messages import THOUGHTS

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
    kept = {name: value for name, value in message.items() if name not in THOUGHTS}
    spoken = (kept.get("content") or "").rpartition(THINK_END)[2]
    return kept | {"content": spoken.lstrip()} if THINK_END in (kept.get("content") or "") else kept


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
