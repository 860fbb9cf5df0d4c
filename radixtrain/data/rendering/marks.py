"""Marks in a chat's messages, which show where a chat template puts their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Marks", "Rendering"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Rendering:
    """A rendered chat.

    text: without the marks.
    places: message -> the characters of `text` before which its mark stood; a template may write a name twice.
    """

    text: str
    places: dict[int, list[int]]


class Marks:
    """Words of letters and digits, one for each message.

    text: everything that may be rendered; no mark occurs in it.
    """

    def __init__(self, text: str):
        self.stem = "Zq"
        while self.stem in text:
            self.stem += "q"
        self.pattern = re.compile(self.stem + r"(\d+)Z")

    def word(self, n: int) -> str:
        """The mark of message n."""
        return f"{self.stem}{n}Z"

    def into(self, message: Message, n: int) -> Message:
        """A message as `check_messages` returns it, with its mark where templates neither trim nor look for a word.

        That is in the name of its last tool call, at the end of the assistant's text, or in the middle of any other.
        """
        if message.get("tool_calls"):
            *calls, last = message["tool_calls"]
            return message | {"tool_calls": [*calls, self._into_call(last, n)]}
        content = message["content"]
        num_blanks = len(content) - len(content.lstrip())
        length = len(content.strip())
        at = num_blanks + (length if message["role"] == "assistant" else length // 2)
        return message | {"content": content[:at] + self.word(n) + content[at:]}

    def read(self, marked: str) -> Rendering:
        """What was rendered, and where the marks stood in it."""
        texts = self.pattern.split(marked)
        places: dict[int, list[int]] = {}
        place = 0
        for text, n in zip(texts[::2], texts[1::2], strict=False):
            place += len(text)
            places.setdefault(int(n), []).append(place)
        return Rendering("".join(texts[::2]), places)

    def _into_call(self, call: dict[str, Any], n: int) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return call | {"function": self._into_call(call["function"], n)}
        return call | {"name": f"{call.get('name', '')}{self.word(n)}"}
