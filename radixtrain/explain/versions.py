"""Prompts that are versions of one text: what nearly all rows have, in the same order, and the differences between.

A unit is a line or a sentence, whatever blanks are in it. Only the trunk of a prompt is read: up to its last unit that
another prompt computes too. What follows, such as a question, belongs to the row.

    Today is | Monday  | . You answer letters. Customer | 1044  | , be polite ...
    Today is | 3 March | . You answer letters. Customer | 20991 | , be polite ...
               a date                                     a number

1. Group the trunks: a trunk joins the group whose first trunk has half of its repeated units (`_groups`).
2. Find a group's common units: those that 98 % of its rows have once, in the same order (`_common_units`).
3. Read each gap between two of them as a difference, whose values tell the cause (`_places`).

All prompts of one text have the same differences, some of them with an empty value. A unit that changes places is not
common, so that tools in another order are one difference, from the first to the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, takewhile

from radixtrain.explain.causes import DRAWN, WHITE_SPACE, Cause, Value, cause_of

# Units and words have their blanks, so that they join to their text.
UNIT = re.compile(r"\s*\S.*?(?:[.!?](?=\s)|[。！？]|(?=[\r\n])|\Z)\s*", re.DOTALL)
WORD = re.compile(r"\s*(?:[^\s。！？]+[。！？]*|[。！？]+)\s*")
MIN_SIZE = 8  # of a unit that counts as text: words around a turn, or a short answer, recur by chance
MIN_REPEATED = 40  # size of the repeated units of a trunk: questions that follow a pattern repeat fewer
MIN_ALIKE = 0.5  # share of repeated units that others have: for a version of one text, or for a mix of several
MIN_COMMON, MIN_IN_ORDER = 0.98, 0.95  # share of rows with a unit, for it to be common; and in the same order
CONTEXT = 32  # characters on either side of a value, in which a date may continue


@dataclass(eq=False)
class Trunk:
    """The beginning of some prompts, the same text in all.

    units: all of it. names: of the units, with single blanks. repeated: names of those that several prompts compute.
    rows: the prompts, by index.
    """

    units: tuple[str, ...]
    names: list[str]
    repeated: set[str]
    rows: list[int] = field(default_factory=list)

    @cached_property
    def text(self) -> str:
        return "".join(self.units)

    @cached_property
    def offsets(self) -> list[int]:
        """Return where each unit begins, and where the last one ends."""
        return [0, *accumulate(map(len, self.units))]


Spans = dict[Trunk, tuple[int, int]]  # first character and one past the last


@dataclass(eq=False)
class Place:
    """A part of all trunks of a group. spans: where each has it. cause: why they differ; None if they do not."""

    spans: Spans
    cause: Cause | None = None

    def text(self, trunk: Trunk) -> str:
        start, end = self.spans[trunk]
        return trunk.text[start:end]

    @cached_property
    def values(self) -> list[list[Trunk]]:
        """Return the trunks of each value, that of most rows first. Blanks count only if they are the cause."""
        found: dict[str, list[Trunk]] = {}
        for trunk in self.spans:
            text = self.text(trunk)
            found.setdefault(text if self.cause == WHITE_SPACE else _name(text), []).append(trunk)
        return sorted(found.values(), key=lambda trunks: -num_rows(trunks))

    @property
    def usual(self) -> str:
        """Return the text of most rows."""
        return self.text(self.values[0][0])

    def differing(self, cause: str) -> list[list[Trunk]]:
        """Return the values to change if this is the cause: those that less than half of the rows have.

        Without a value that more than half have, all but the empty one.
        """
        if self.cause is None or self.cause.name != cause:
            return []
        most, *others = self.values
        if 2 * num_rows(most) > num_rows(self.spans):
            return others
        return [trunks for trunks in self.values if self.text(trunks[0]).strip()]


def num_rows(trunks: Iterable[Trunk]) -> int:
    return sum(len(trunk.rows) for trunk in trunks)


def num_equal(*texts: Sequence[str]) -> int:
    """Count the words or characters with which all begin."""
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False)))


def find_versions(texts: Sequence[str]) -> list[list[Place]]:
    """Cut the prompts that differ early from others of the same text: the places of each group, up to what is common.

    A place begins where the one before it ends.
    """
    *apart, mixed = _groups(_trunks(texts))
    return [_places(group, group is mixed) for group in (*apart, mixed) if len(group) > 1]


@cache
def _name(text: str) -> str:
    return " ".join(text.split())


@cache
def _size(text: str) -> int:
    """Return about the number of tokens, in any script, without markup."""
    return len(re.findall(r"\w{1,4}", re.sub(r"<\S*?>", "", text)))


def _trunks(texts: Sequence[str]) -> list[Trunk]:
    """Return the trunks of prompts with enough repeated text, the one with most rows first."""
    rows_of: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(texts):
        rows_of.setdefault(tuple(UNIT.findall(text)), []).append(row)
    num_computed: Counter[str] = Counter()
    before: tuple[str, ...] = ()
    for units in sorted(rows_of):
        num_computed.update({_name(unit) for unit in units[num_equal(before, units) :]})
        before = units
    trunks: dict[tuple[str, ...], Trunk] = {}
    for units, rows in rows_of.items():
        repeated = [n for n, unit in enumerate(units) if num_computed[_name(unit)] > 1 and _size(unit) >= MIN_SIZE]
        if sum(_size(units[n]) for n in repeated) >= MIN_REPEATED:
            own = units[: repeated[-1] + 1]
            trunk = trunks.setdefault(own, Trunk(own, [*map(_name, own)], {_name(units[n]) for n in repeated}))
            trunk.rows += rows
    return sorted(trunks.values(), key=lambda trunk: -len(trunk.rows))


def _groups(trunks: list[Trunk]) -> list[list[Trunk]]:
    """Group trunks that are versions of the first in their group; the last group has those made of several texts."""
    groups: list[list[Trunk]] = []
    groups_of: dict[str, list[int]] = {}  # of each unit, those whose first trunk has it
    for trunk in trunks:
        alike = Counter(group for unit in trunk.repeated for group in groups_of.get(unit, ()))
        ((group, number),) = alike.most_common(1) or [(0, 0)]
        if number >= MIN_ALIKE * len(trunk.repeated):
            groups[group].append(trunk)
            continue
        for unit in {*trunk.names}:
            groups_of.setdefault(unit, []).append(len(groups))
        groups.append([trunk])
    first = [group[0].repeated for group in groups]
    is_mixed = [sum(len(groups_of[unit]) > 1 for unit in own) >= MIN_ALIKE * len(own) for own in first]
    if sum(is_mixed) < 3:
        return [*groups, []]
    apart = [group for group, mixed in zip(groups, is_mixed, strict=True) if not mixed]
    return [*apart, [trunk for group, mixed in zip(groups, is_mixed, strict=True) if mixed for trunk in group]]


def _places(trunks: list[Trunk], is_mixed: bool) -> list[Place]:
    """Cut the trunks at what differs, except those that lack a unit which nearly all have.

    is_mixed: whether they are made of several texts. Only then their ends may be drawn from a pool; other ends are the
        prompts' own and need no fix.
    """
    common = _common_units(trunks)
    starts, places = dict.fromkeys(common, 0), list[Place]()
    last = len(next(iter(common.values())))

    def add_common(ends: dict[Trunk, int]) -> None:
        spans = {trunk: (starts[trunk], end) for trunk, end in ends.items()}
        differ = len({trunk.text[start:end] for trunk, (start, end) in spans.items()}) > 1
        places.append(Place(spans, WHITE_SPACE if differ else None))

    for number in range(last + 1):
        units = {trunk: ([-1, *own][number] + 1, [*own, len(trunk.units)][number]) for trunk, own in common.items()}
        gap = _difference({trunk: (trunk.offsets[start], trunk.offsets[end]) for trunk, (start, end) in units.items()})
        if len(gap.values) == 1:
            continue
        cause = cause_of([_value(gap, same, units[same[0]]) for same in gap.values])
        add_common({trunk: start for trunk, (start, _) in gap.spans.items()})
        if number == last and (cause.moves or (cause == DRAWN and not is_mixed)):
            return places
        places.append(Place(gap.spans, cause))
        starts = {trunk: end for trunk, (_, end) in gap.spans.items()}
    add_common({trunk: len(trunk.text) for trunk in common})
    return places


def _difference(spans: Spans) -> Place:
    """Leave out the words with which all of these parts begin and end."""
    words = {trunk: WORD.findall(trunk.text[start:end]) for trunk, (start, end) in spans.items()}
    names = [[*map(_name, own)] for own in words.values()]
    head = num_equal(*names)
    tail = num_equal(*(own[head:][::-1] for own in names))
    inner: Spans = {}
    for trunk, (start, end) in spans.items():
        own = words[trunk]
        inner[trunk] = start + sum(map(len, own[:head])), end - sum(map(len, own[len(own) - tail :]))
    return Place(inner)


def _value(place: Place, trunks: list[Trunk], units: tuple[int, int]) -> Value:
    """Describe what these trunks have at a place. units: of the first, first and one past the last."""
    first = trunks[0]
    (start, end), names = place.spans[first], first.names[slice(*units)]
    return Value(
        text=place.text(first).strip(),
        before=first.text[:start][-CONTEXT:],
        after=f" {first.text[end:][:CONTEXT]}",
        num_rows=num_rows(trunks),
        repeated=sum(name in first.repeated for name in names) / max(1, len(names)),
    )


def _common_units(trunks: list[Trunk]) -> dict[Trunk, list[int]]:
    """Return the indices of the units that nearly all rows have once, at the same rank among such units.

    As many for each trunk; those without one of these units are left out.
    """
    total = num_rows(trunks)
    rows_with: Counter[str] = Counter()
    for trunk in trunks:
        once = [name for name, number in Counter(trunk.names).items() if number == 1 and _size(name) >= MIN_SIZE]
        rows_with.update(dict.fromkeys(once, len(trunk.rows)))
    rows_in_order: Counter[tuple[int, str]] = Counter()
    ranked = {}
    for trunk in trunks:
        common = [n for n, name in enumerate(trunk.names) if rows_with[name] >= MIN_COMMON * total]
        ranked[trunk] = {(rank, trunk.names[n]): n for rank, n in enumerate(common)}
        rows_in_order.update(dict.fromkeys(ranked[trunk], len(trunk.rows)))
    kept = sorted(key for key, number in rows_in_order.items() if number >= MIN_IN_ORDER * total)
    if not any(own.keys() >= {*kept} for own in ranked.values()):  # each lacks another one
        kept = []
    return {trunk: [own[key] for key in kept] for trunk, own in ranked.items() if own.keys() >= {*kept}}
