"""What rendering one chat may cost. A chat template is a program of strangers: it may never end, or fill the memory.

Jinja's sandbox keeps a template from reading files and from running other code, not from computing. An `Account` counts
what one rendering does; `radixtrain/data/rendering/limited.py` makes templates that keep one. Counted are passes of
loops and calls, and what is made and kept: texts and lists grow by being put together again and again.

The limits are counts, so that a row is refused on every machine or on none. The clock is for what cannot be counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from time import monotonic
from typing import Any

__all__ = ["MAX_CHARACTERS", "MAX_SECONDS", "MAX_STEPS", "Account", "TemplateLimitError", "check_length", "join_pieces"]

MAX_STEPS = 5_000_000  # 2000 turns that each look at all the others make 4,000,000
MAX_CHARACTERS = 1 << 28  # a chat of a million tokens has 4 million
MAX_ENTRIES = 250_000  # of a list or a mapping and those inside of it; a chat of 10,000 turns has 40,000
MAX_SECONDS = 60.0
MAX_WIDTH = 100_000  # characters that a text is padded or indented to, or entries of a batch
MAX_BITS = 100_000  # of a whole number
STEPS_BETWEEN_LOOKS = 64  # at the clock
PIECES_AT_ONCE = 256
POINTER = 8  # bytes: an entry of a list counts as so many characters
WIDTH = re.compile(r"\d{6}|\*|\{[^{}]*\{")  # in a format: a number of six digits, or one that is given as a value
TOO_LONG = f"makes more than {MAX_CHARACTERS:,} characters of text"


class TemplateLimitError(Exception):
    """A template did more than one rendering may cost. The message goes on after "the chat template"."""


class Account:
    """What one rendering has done so far. Every method raises TemplateLimitError if that is too much."""

    def __init__(self) -> None:
        self.steps = 0
        self.characters = 0
        self.deadline = monotonic() + MAX_SECONDS

    def step(self) -> bool:
        """Count a pass of a loop, or a call. Always true."""
        self.steps += 1
        if not self.steps % STEPS_BETWEEN_LOOKS:
            if self.steps > MAX_STEPS:
                raise TemplateLimitError(f"makes more than {MAX_STEPS:,} passes of loops and calls")
            if monotonic() > self.deadline:
                raise TemplateLimitError(f"takes more than {MAX_SECONDS:g} seconds")
        return True

    def made(self, value: Any) -> Any:
        """The value, which is new and may be kept.

        Of a list or a mapping its entries count. What would be written of it must be allowed too, since one text may be
        in it many times.
        """
        if value.__class__ is str:
            self.characters += len(value)
        elif isinstance(value, list | tuple | dict):
            self.characters += POINTER * len(value)
            self.allow(self.weight(value))
        check_length(self.characters)
        return value

    def counted(self, values: Iterator[Any]) -> Iterator[Any]:
        """The values of an iterator. Each is a step, and may be kept."""
        for value in values:
            self.step()
            yield self.made(value)

    def allow(self, characters: int) -> None:
        """Before something is made: whether so many characters are left."""
        check_length(self.characters + characters)

    def weight(self, value: Any) -> int:
        """Characters that are written of nested lists and mappings, about; eight entries are a step."""
        waiting, found, num_entries = [value], 0, 0
        while waiting:
            each = waiting.pop()
            if isinstance(each, str):
                found += len(each)
            elif isinstance(each, dict):
                waiting += [*each, *each.values()]
            elif isinstance(each, list | tuple):
                waiting += each
            found += POINTER
            num_entries += 1
            if num_entries + len(waiting) > MAX_ENTRIES:
                raise TemplateLimitError(f"puts more than {MAX_ENTRIES:,} entries into lists and mappings")
        self.steps += num_entries // POINTER
        return found

    def allow_width(self, *numbers: Any) -> None:
        """Before a text is padded or indented, or a list is cut."""
        if any(isinstance(number, int) and abs(number) > MAX_WIDTH for number in numbers):
            raise TemplateLimitError(f"pads, indents or cuts by more than {MAX_WIDTH:,}")

    def allow_operation(self, operator: str, left: Any, right: Any) -> None:
        """Before `left * right`, `left ** right` or `left % right`."""
        if isinstance(left, int) and isinstance(right, int) and operator != "%":
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"computes a whole number of more than {MAX_BITS:,} bits")
        elif isinstance(left, str) and operator == "%":
            self.allow_format(left, right)
        elif operator == "*":
            value, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                self.allow(max(times, 0) * (len(value) if isinstance(value, str) else self.weight(value)))

    def allow_method(self, text: str, name: str, args: tuple[Any, ...]) -> None:
        """Before a method of a text, or the filter of this name, that may make a far longer one of it."""
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            self.allow_width(*args)
            self.allow(text.count("\t") * MAX_WIDTH if name == "expandtabs" and args else 0)
        elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            self.allow(len(text) + text.count(args[0]) * max(len(args[1]) - len(args[0]), 0))
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self.allow(self.weight(args[0]) + len(text) * len(args[0]))
        elif name == "translate" and args and isinstance(args[0], Mapping):
            self.allow(len(text) * max((len(each) for each in args[0].values() if isinstance(each, str)), default=1))

    def allow_format(self, text: str, values: Any) -> None:
        """Before a text with places for values is filled."""
        if WIDTH.search(text):
            raise TemplateLimitError("formats a value with a width of six digits, or one that it computes")
        self.allow(self.weight(values) * (text.count("{") + text.count("%")))


def join_pieces(pieces: Iterable[str]) -> str:
    """The pieces that a template writes, as one text. TemplateLimitError, before there is one, if it is too long."""
    pieces, length = iter(pieces), 0
    found: list[str] = []
    while some := list(islice(pieces, PIECES_AT_ONCE)):
        length += sum(map(len, some))
        check_length(length)
        found += some
    return "".join(found)


def check_length(length: int) -> None:
    """TemplateLimitError if a text of so many characters is too long."""
    if length > MAX_CHARACTERS:
        raise TemplateLimitError(TOO_LONG)
