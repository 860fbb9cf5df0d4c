"""What a difference between prompts is: a date, an id, a name, another order, another wording; and what to do about it.

Decided on the text that differs, in whole words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from radixtrain.tree.arrays import IntArray

MIN_SHARE = 0.8  # of the rows whose value looks like a date, for the difference to be one
MAX_SHORT = 12  # words of a date, an id or a number
MAX_NAME = 4  # words of the name of somebody or something
MAX_VERSIONS = 5
MIN_ROWS = 10  # of each version, on average


@dataclass(frozen=True)
class Cause:
    """A reason why prompts part early.

    name: as the report says it. advice: what to do, a sentence.
    moves: whether it is moved to the end of the common text; otherwise all rows get the same.
    """

    name: str
    advice: str
    moves: bool


@dataclass(frozen=True, eq=False)
class Value:
    """What some rows have at a difference.

    text: of the value. before, after: the text around it. symbols: (n,), int64, of the value.
    num_rows: that have it. repeated: share of the value that other prompts compute too.
    """

    text: str
    before: str
    after: str
    symbols: IntArray
    num_rows: int
    repeated: float

    @property
    def num_words(self) -> int:
        return len(self.text.split())


_MOVE = "at the end of the system prompt, after everything that all rows have, or in the user's message"
CAUSES = {
    cause.name: cause
    for cause in (
        Cause("a date or time", f"Write it {_MOVE}.", True),
        Cause("a UUID", f"Remove it if the answer does not need it, or write it {_MOVE}.", True),
        Cause("an id or hash", f"Remove it if the answer does not need it, or write it {_MOVE}.", True),
        Cause("a number", f"Write it {_MOVE}.", True),
        Cause("a name", f"Write it {_MOVE}.", True),
        Cause(
            "a text of the row's own",
            "Write the instructions that all rows have first, and this text after them.",
            True,
        ),
        Cause("the order of the tools", "Sort the tools, for instance by name, in every row.", False),
        Cause("the order of the examples", "Keep the examples in one order in every row.", False),
        Cause("the order of a list", "Keep the list in one order in every row.", False),
        Cause(
            "the choice of the examples",
            "Give all rows the same examples, or draw them from a few fixed sets. What a row needs, as a passage that "
            "was found for its question, can only stand after everything else.",
            False,
        ),
        Cause(
            "another version of the template", "Write the prompts of all rows with one version of the template.", False
        ),
    )
}
DRAWN = CAUSES["the choice of the examples"]
WHITE_SPACE = Cause("white space", "Write the same blanks and line ends in every row.", moves=False)

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|sept|oct|nov|dec)(?:uary|ruary|ch|il|e|y|ust|tember|ober|ember)?\b\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\b\d{{1,2}}[-/.]\d{{1,2}}[-/.](?:\d{{4}}|\d{{2}})\b"
    rf"|\b{_DAY}(?:\s+of)?[\s-]+{_MONTH}(?:,?[\s-]+\d{{4}})?|\b{_MONTH}[\s-]+{_DAY}\b(?:,?\s+\d{{4}})?|\b{_MONTH}\s+\d{{4}}"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|\b\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?m\b)?"
    r"|\d{4}\s*年\s*\d{1,2}\s*月(?:\s*\d{1,2}\s*日)?",
    re.IGNORECASE,
)
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_ID = re.compile(r"(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{6,}|\b[0-9a-f]{12,}\b", re.IGNORECASE)
_NUMBER = re.compile(r"[^\w]*\d[\d.,:/%]*[^\w]*")


def cause_of(values: list[Value]) -> Cause:
    """The cause of a difference. values: the distinct ones, in any order."""
    ranked = sorted(values, key=lambda value: -value.num_rows)
    usual = ranked[0].num_rows * 2 >= sum(value.num_rows for value in ranked)
    others = [value for value in ranked[1 if usual else 0 :] if len(value.symbols)]
    if not others:
        return CAUSES["another version of the template"]
    return CAUSES[_short(others) or _order(ranked) or _wording(ranked) or _own(others)]


def _short(values: list[Value]) -> str | None:
    """The kind of thing that most values are, if they are short."""
    if median(value.num_words for value in values) > MAX_SHORT:
        return None
    return next((name for name, looks_so in _KINDS.items() if _share(values, looks_so) >= MIN_SHARE), None)


def _share(values: list[Value], holds: Callable[[Value], bool]) -> float:
    """Of the rows, those whose value is so."""
    rows = sum(value.num_rows for value in values)
    return sum(value.num_rows for value in values if holds(value)) / rows


def _overlaps(pattern: re.Pattern[str], value: Value) -> bool:
    """Whether the pattern is found, around the value, in a place that has a part of the value."""
    start, end = len(value.before), len(value.before) + len(value.text)
    matches = pattern.finditer(value.before + value.text + value.after)
    return any(match.start() < end and match.end() > start for match in matches)


_KINDS: dict[str, Callable[[Value], bool]] = {
    "a UUID": lambda value: _overlaps(_UUID, value),
    "a date or time": lambda value: _overlaps(_DATE, value),
    "a number": lambda value: _NUMBER.fullmatch(value.text) is not None,
    "an id or hash": lambda value: _overlaps(_ID, value),
}


def _order(ranked: list[Value]) -> str | None:
    """Which things are in another order, if the values are the same words."""
    first, *others = ranked
    if _share(others, lambda value: _same_words(value.symbols, first.symbols)) < MIN_SHARE:
        return None
    if '"parameters"' in first.text or '"function"' in first.text:
        return "the order of the tools"
    return "the order of the examples" if first.num_words > 30 or "\n" in first.text.strip() else "the order of a list"


def _same_words(one: IntArray, other: IntArray) -> bool:
    if min(len(one), len(other)) < 4:
        return False
    both = sum((Counter(one.tolist()) & Counter(other.tolist())).values())
    return both >= 0.85 * max(len(one), len(other))


def _wording(ranked: list[Value]) -> str | None:
    rows = sum(value.num_rows for value in ranked)
    few = len(ranked) <= MAX_VERSIONS and rows >= MIN_ROWS * len(ranked)
    return "another version of the template" if few and not all(map(_is_name, ranked)) else None


def _is_name(value: Value) -> bool:
    """One to three words with capitals that no beginning of a sentence explains."""
    words = value.text.split()
    inside = value.before.rstrip()[-1:] not in ("", ".", "!", "?", "\n")
    return inside and 1 <= len(words) <= 3 and all(word.lstrip("\"'(").istitle() for word in words)


def _own(values: list[Value]) -> str:
    sizes = [value.num_words for value in values]
    if median(sizes) <= MAX_NAME:
        return "a name"
    is_drawn = np.average([value.repeated for value in values], weights=[value.num_rows for value in values]) >= 0.6
    return "the choice of the examples" if is_drawn else "a text of the row's own"
