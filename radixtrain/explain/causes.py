"""Names the cause of a difference between prompts: a date, an id, a name, another order, several prompts; and advises.

Judges the texts that differ, in whole words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

MIN_SHARE = 0.8  # share of rows with a value like a date, for the difference to be a date
MAX_SHORT, MAX_NAME = 40, 4  # words around a date or an id; words of a name
MIN_ROWS = 10  # per text, on average, for it to be an intended prompt
STRAY = 0.1  # share of rows up to which a different wording counts as unintended
MIN_REPEATED = 0.6  # share of texts that other rows have too, for them to come from one pool
MAX_ENTRY = 8  # words in a line of a list; examples have more


class Cause(NamedTuple):
    """A reason why prompts diverge early.

    name: as the report shows it. advice: a sentence on what to do.
    moves: whether the fix moves it to the end of the common text; otherwise the fix gives all rows the same.
    """

    name: str
    advice: str
    moves: bool


class Value(NamedTuple):
    """What some rows have at a difference.

    text: of the value. before, after: the text around it.
    num_rows: rows with it. repeated: share of its lines and sentences that other prompts compute too.
    """

    text: str
    before: str
    after: str
    num_rows: int
    repeated: float

    @property
    def words(self) -> list[str]:
        return self.text.split()


_MOVE = "rite it at the end of the system prompt, after everything that all rows have, or in the user's message."
_REMOVE = f"Remove it if the answer does not need it, or w{_MOVE}"
MOVED = {
    **dict.fromkeys(("a date or time", "a number", "a name"), f"W{_MOVE}"),
    **dict.fromkeys(("a UUID", "an id or hash"), _REMOVE),
    "a text of the row's own": "Write the instructions that all rows have first, and this text after them.",
    "several prompts": "Many rows use each of them, so they may well be intended: rows of one prompt share it, and "
    "data.group_by_prefix brings them together. To share more, put what all have in common first and this after it; "
    "or, if they are versions of one text, keep one of them.",
}
MADE_ALIKE = {
    "the order of the tools": "Sort the tools, for instance by name, in every row.",
    "the order of the examples": "Keep the examples in one order in every row.",
    "the order of a list": "Keep the list in one order in every row.",
    "the choice of the examples": "Give all rows the same examples, or draw them from a few fixed sets. What only "
    "one row needs, such as a passage retrieved for its question, must come after everything else.",
    "another version of the template": "Write the prompts of all rows with one version of the template.",
    "white space": "Use the same blanks and line endings in every row.",
}
DRAWN, WHITE_SPACE = (Cause(name, MADE_ALIKE[name], False) for name in ("the choice of the examples", "white space"))
SEVERAL = Cause("several prompts", MOVED["several prompts"], True)

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
_KINDS: dict[str, Callable[[Value], object]] = {
    "a date or time": lambda value: _overlaps(_DATE, value),
    "a UUID": lambda value: _overlaps(_UUID, value),
    "a number": lambda value: _NUMBER.fullmatch(value.text),
    "an id or hash": lambda value: _overlaps(_ID, value),
}


def cause_of(values: list[Value]) -> Cause:
    """Find the cause of a difference. values: the distinct ones, in any order."""
    ranked = sorted(values, key=lambda value: -value.num_rows)
    num_rows, most = sum(value.num_rows for value in ranked), ranked[0].num_rows
    others = [value for value in ranked[1 if 2 * most >= num_rows else 0 :] if value.words]
    if others and (kinds := _short(others)):
        return Cause(" and ".join(kinds), MOVED[kinds[0]], True)
    is_meant = num_rows >= MIN_ROWS * len(ranked)  # texts of many rows each
    if not others or (is_meant and most > (1 - STRAY) * num_rows):
        name = "another version of the template"
    else:
        name = _order(ranked) or (SEVERAL.name if is_meant else _own(others))
    return Cause(name, (MOVED | MADE_ALIKE)[name], name in MOVED)


def _short(values: list[Value]) -> list[str]:
    """Return the kinds of things that most values hold, if they are short. A date or a UUID is not another id."""
    if median(len(value.words) for value in values) > MAX_SHORT:
        return []
    found = [name for name, looks_so in _KINDS.items() if _share(values, looks_so)]
    return found[:2] if found[:2] == ["a date or time", "a UUID"] else found[:1]


def _share(values: list[Value], holds: Callable[[Value], object]) -> bool:
    """Return whether the condition holds for the values of most rows."""
    rows = sum(value.num_rows for value in values)
    return sum(value.num_rows for value in values if holds(value)) >= MIN_SHARE * rows


def _overlaps(pattern: re.Pattern[str], value: Value) -> bool:
    """Return whether the pattern, searched in the text around the value, matches a part of the value."""
    start, end = len(value.before), len(value.before) + len(value.text)
    matches = pattern.finditer(value.before + value.text + value.after)
    return any(match.start() < end and match.end() > start for match in matches)


def _order(ranked: list[Value]) -> str | None:
    """Name the things that are in another order, if the values have the same words."""
    first, *others = ranked
    if not others or not _share(others, lambda value: _same_words(value.words, first.words)):
        return None
    if '"parameters"' in first.text or '"function"' in first.text:
        return "the order of the tools"
    is_list = len(first.words) <= MAX_ENTRY * len(first.text.strip().splitlines())
    return "the order of a list" if is_list else "the order of the examples"


def _same_words(one: list[str], other: list[str]) -> bool:
    both = (Counter(one) & Counter(other)).total()
    return min(len(one), len(other)) >= 4 and both >= 0.85 * max(len(one), len(other))


def _own(values: list[Value]) -> str:
    if median(len(value.words) for value in values) <= MAX_NAME:
        return "a name"
    is_drawn = np.average([value.repeated for value in values], weights=[value.num_rows for value in values])
    return DRAWN.name if is_drawn >= MIN_REPEATED else "a text of the row's own"
