"""Prompts that are versions of one text: what nearly all rows have, in the same order, and the differences between.

A unit is a line or a sentence, whatever blanks are in it. Only the trunk of a prompt is read: up to its last unit that
another prompt computes too. What follows, such as a question, belongs to the row.

    Today is | Monday  | . You answer letters. Customer | 1044  | , be polite ...
    Today is | 3 March | . You answer letters. Customer | 20991 | , be polite ...
               a date                                     a number

1. Group the trunks: a trunk joins the group whose first trunk has half of its repeated units (`_groups`).
2. Find a group's common units: those that 98 % of its rows have once, in the same order (`_gaps`).
3. Read each gap between two of them as a difference, whose values tell the cause (`_places`).

All prompts of one text have the same differences, some of them with an empty value. A unit that changes places is not
common, so that tools in another order are one difference, from the first to the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from radixtrain.explain.causes import DRAWN, MIN_ROWS, SEVERAL, WHITE_SPACE, Cause, Value, cause_of

WORD = re.compile(r"\s*(?:[^\s。！？]+[。！？]*|[。！？]+)\s*")  # with its blanks, so that words join to their text
UNIT_END = re.compile(r"[.!?]\s|[\r\n。！？]")
MARKUP = re.compile(r"<\S*?>")
MIN_SIZE = 8  # of a unit that counts as text: words around a turn, or a short answer, recur by chance
MIN_REPEATED = 40  # size of the repeated units of a trunk: questions that follow a pattern repeat fewer
MIN_ALIKE = 0.5  # share of repeated units that others have: for a version of one text, or for a mix of several
MIN_COMMON, MIN_IN_ORDER = 0.98, 0.95  # share of rows with a unit, for it to be common; and in the same order
CONTEXT = 4  # words on either side of a value, in which a date may continue


class Unit(NamedTuple):
    """A line or a sentence. text: with single blanks. start, end: its words in the prompt."""

    text: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """Return about its number of tokens, in any script."""
        return len(re.findall(r"\w{1,4}", MARKUP.sub("", self.text)))


@dataclass(eq=False)
class Trunk:
    """The beginning of some prompts, the same text in all.

    words: with their blanks. units: all of it. repeated: those that several prompts compute.
    rows: the prompts, by index.
    """

    words: list[str]
    units: list[Unit]
    repeated: set[str]
    rows: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Place:
    """A part of all trunks of a group. texts: what each has there. cause: why they differ; None if they do not."""

    texts: dict[Trunk, str]
    cause: Cause | None = None

    @property
    def values(self) -> dict[Trunk, str]:
        """Return what is compared: blanks count only if they are the cause."""
        return {trunk: text if self.cause == WHITE_SPACE else _bare(text.split()) for trunk, text in self.texts.items()}

    @property
    def trunks_of(self) -> dict[str, list[Trunk]]:
        """Return the trunks of each value, that of most rows first."""
        found: dict[str, list[Trunk]] = {}
        for trunk, value in self.values.items():
            found.setdefault(value, []).append(trunk)
        return dict(sorted(found.items(), key=lambda item: -num_rows(item[1])))

    @property
    def usual(self) -> str:
        """Return the text of most rows."""
        return self.texts[next(iter(self.trunks_of.values()))[0]]

    def others(self) -> list[Trunk]:
        """Return trunks that differ from more than half of the rows; without such a majority, all that have a value."""
        (_, most), *others = self.trunks_of.items()
        if 2 * num_rows(most) <= num_rows(self.texts):
            others = [(value, trunks) for value, trunks in self.trunks_of.items() if value]
        return [trunk for _, trunks in others for trunk in trunks]


def num_rows(trunks: Iterable[Trunk]) -> int:
    return sum(len(trunk.rows) for trunk in trunks)


def num_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the words or characters with which both begin."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _num_equal_in_all(texts: list[list[str]]) -> int:
    return min(num_equal(texts[0], text) for text in texts)


def find_versions(texts: Sequence[str]) -> list[list[Place]]:
    """Cut the prompts that differ early from others of the same text: the places of each group, up to what is common.

    A place begins where the one before it ends.
    """
    *apart, mixed = _groups(_trunks(texts))
    return [_one_entry(_places(group, group is mixed)) for group in (*apart, mixed) if len(group) > 1]


def _trunks(texts: Sequence[str]) -> list[Trunk]:
    """Return the trunks of prompts with enough repeated text, the one with most rows first."""
    rows_of: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows_of.setdefault(text, []).append(row)
    prompts = sorted((WORD.findall(text), rows) for text, rows in rows_of.items())
    units = [_units(words) for words, _ in prompts]
    num_computed: Counter[str] = Counter()
    before: list[str] = []
    for (words, _), own in zip(prompts, units, strict=True):
        num_shared = num_equal(before, words)
        num_computed.update({unit.text for unit in own if unit.end > num_shared})
        before = words
    trunks: dict[str, Trunk] = {}
    for (words, rows), own in zip(prompts, units, strict=True):
        repeated = [unit for unit in own if num_computed[unit.text] > 1 and unit.size >= MIN_SIZE]
        if sum(unit.size for unit in repeated) >= MIN_REPEATED:
            end = repeated[-1].end
            whole = [unit for unit in own if unit.end <= end]
            trunk = Trunk(words[:end], whole, {unit.text for unit in repeated})
            trunks.setdefault("".join(trunk.words), trunk).rows += rows
    return sorted(trunks.values(), key=lambda trunk: -len(trunk.rows))


def _units(words: list[str]) -> list[Unit]:
    ends = [end for end, word in enumerate(words, 1) if UNIT_END.search(word) or end == len(words)]
    return [Unit(_bare(words[start:end]), start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _bare(words: Iterable[str]) -> str:
    return " ".join(word.strip() for word in words)


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
        for text in {unit.text for unit in trunk.units}:
            groups_of.setdefault(text, []).append(len(groups))
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
    gaps, places = _gaps(trunks), []
    done, last = dict.fromkeys(gaps, 0), len(next(iter(gaps.values()))) - 1
    stop = {trunk: len(trunk.words) for trunk in gaps}
    for number in range(last + 1):
        words = {trunk: [word.strip() for word in trunk.words[slice(*own[number])]] for trunk, own in gaps.items()}
        before = _num_equal_in_all([*words.values()])
        after = _num_equal_in_all([own[before:][::-1] for own in words.values()])
        starts = {trunk: own[number][0] + before for trunk, own in gaps.items()}
        ends = {trunk: own[number][1] - after for trunk, own in gaps.items()}
        place = _between(starts, ends)
        if len(values := place.trunks_of.values()) == 1:
            continue
        place.cause = cause = cause_of([_value(same, starts[same[0]], ends[same[0]]) for same in values])
        if number == last and (cause.moves or (cause == DRAWN and not is_mixed)):
            stop = starts
            break
        places += [_between(done, starts), place]
        done = ends
    places.append(_between(done, stop))
    for place in places:
        if not place.cause and len({*place.texts.values()}) > 1:
            place.cause = WHITE_SPACE
    return places


def _between(starts: dict[Trunk, int], ends: dict[Trunk, int]) -> Place:
    return Place({trunk: "".join(trunk.words[start : ends[trunk]]) for trunk, start in starts.items()})


def _gaps(trunks: list[Trunk]) -> dict[Trunk, list[tuple[int, int]]]:
    """Return the words between the units that nearly all rows have once, at the same rank among such units.

    As many gaps for each trunk; those without one of these units are left out.
    """
    total = num_rows(trunks)
    rows_with: Counter[str] = Counter()
    for trunk in trunks:
        times = Counter(unit.text for unit in trunk.units if unit.size >= MIN_SIZE)
        rows_with.update({unit: len(trunk.rows) for unit, number in times.items() if number == 1})
    rows_in_order: Counter[tuple[int, str]] = Counter()
    ranked = {}
    for trunk in trunks:
        common = [unit for unit in trunk.units if rows_with[unit.text] >= MIN_COMMON * total]
        ranked[trunk] = {(rank, unit.text): unit for rank, unit in enumerate(common)}
        rows_in_order.update(dict.fromkeys(ranked[trunk], len(trunk.rows)))
    kept = sorted(key for key, number in rows_in_order.items() if number >= MIN_IN_ORDER * total)
    if not any(own.keys() >= {*kept} for own in ranked.values()):  # each lacks another one
        kept = []
    gaps = {}
    for trunk, own in ranked.items():
        if own.keys() >= {*kept}:
            units = [own[key] for key in kept]
            starts, ends = [0, *(unit.end for unit in units)], [*(unit.start for unit in units), len(trunk.words)]
            gaps[trunk] = list(zip(starts, ends, strict=True))
    return gaps


def _value(trunks: list[Trunk], start: int, end: int) -> Value:
    """Return what these trunks have, at these words of the first of them."""
    first = trunks[0]
    units = [unit.text in first.repeated for unit in first.units if start < unit.end and unit.start < end]
    return Value(
        text="".join(first.words[start:end]).strip(),
        before="".join(first.words[max(0, start - CONTEXT) : start]),
        after=" " + "".join(first.words[end : end + CONTEXT]),
        num_rows=num_rows(trunks),
        repeated=sum(units) / max(1, len(units)),
    )


def _one_entry(places: list[Place]) -> list[Place]:
    """Merge differences between several prompts into one cause, also where only some differ, or by a name.

    A difference independent of the prompt, as a date or a stray version in the rows of each, is a cause of its own: its
    combinations with the prompts are as many as their product, not their sum.
    """
    values = [place.values for place in places]
    meant = [own for place, own in zip(places, values, strict=True) if place.cause == SEVERAL]
    prompts = {trunk: tuple(own[trunk] for own in meant) for trunk in places[0].texts}
    for place, own in zip(places, values, strict=True):
        together = len({(prompt, own[trunk]) for trunk, prompt in prompts.items()})
        is_nested = together < len({*prompts.values()}) + len({*own.values()})
        is_nested &= num_rows(prompts) >= MIN_ROWS * together
        if meant and is_nested and place.cause not in (None, WHITE_SPACE):
            place.cause = SEVERAL
    return places
