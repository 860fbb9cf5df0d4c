"""Prompts that are versions of one text, read side by side: common text, a difference, common text, a difference ...

Only the trunk of a prompt is read: up to the last text that another prompt computes too. What follows is the row's own,
as a question is.

    Today is | Monday  | . You answer letters. Customer | 1044  | , be polite ...
    Today is | 3 March | . You answer letters. Customer | 20991 | , be polite ...
               Difference: a date                         Difference: a number

After a difference the reading goes on at the first place that all prompts have, so that no text before it in one prompt
stands after it in another. What changes places is therefore one difference, as tools in another order are. Prompts that
have nothing of what follows are set apart and read by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixtrain.data.tokens.decode import text_of_run
from radixtrain.report.causes import WHITE_SPACE, Cause, Value, cause_of
from radixtrain.report.prompt_text import MIN_RUN, SHINGLE, Flags, Hashes, Prompt, repeated_symbols, shingles
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_REPEATED = 48  # symbols of a prompt: questions made from a pattern repeat fewer
MIN_ALIKE = 0.5  # of the repeated text of a trunk, for it to be a version of another
MIN_MIXED = 0.6  # of the repeated text of a trunk, for it to be put together from the texts of others
MAX_SHINGLES = 200_000  # of all trunks, by which they are grouped
MIN_MOVED = 0.05  # of the rows with the same texts in another order, up to the end, for that to be one difference
MIN_COVER = 0.05  # of the rows of a group have a text, for it to be common
MOST = 0.9  # of the rows meet again before the others are set apart
MAX_SMALL = 60  # symbols of a difference that is compared word by word
CONTEXT = 16  # tokens on either side of a value that are decoded
MAX_VALUE = 400  # tokens of a value that are decoded


@dataclass(frozen=True, eq=False)
class Trunk:
    """The beginning of some prompts, the same tokens in all.

    prompt: one of them. size: symbols of the trunk. rows: the prompts, by index.
    hashes: its shingles. repeated: (size,), bool. text that is computed at several places.
    """

    prompt: Prompt
    size: int
    rows: tuple[int, ...]
    hashes: Hashes
    repeated: Flags

    @property
    def symbols(self) -> IntArray:
        return self.prompt.symbols[: self.size]

    @cached_property
    def unique_shingles(self) -> tuple[Hashes, IntArray]:
        """Those that occur once in it, sorted, and at which symbols."""
        values, first, counts = np.unique(self.hashes, return_index=True, return_counts=True)
        return values[counts == 1], first[counts == 1]

    def fingerprint(self, largest: int) -> set[int]:
        """Its repeated shingles up to this hash: a sample that is drawn alike from every text."""
        own = self.hashes[self.repeated[: len(self.hashes)]]
        return set(own[own <= np.uint64(largest)].tolist())


@dataclass(frozen=True, eq=False)
class Difference:
    """A place where prompts differ.

    cause: what stands there. usual: the tokens of most rows. usual_value: their `Piece.value`.
    is_majority: whether that is more than half of the rows.
    """

    cause: Cause
    usual: IntArray
    usual_value: bytes
    is_majority: bool

    def touches(self, value: bytes) -> bool:
        """Whether a row with this value has to change: it differs from the majority, or there is none."""
        return value != self.usual_value if self.is_majority else bool(value) or not self.cause.moves


class Piece(NamedTuple):
    """Tokens [start, end) of a prompt. value: what counts as equal there. difference: None for common text."""

    start: int
    end: int
    value: bytes = b""
    difference: Difference | None = None


Layout = Mapping[Trunk, list[Piece]]  # of each trunk, one after the other from its start to the end of what is common
Cursors = dict[Trunk, int]  # the symbol at which the reading of each trunk stands


def find_layouts(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Layout]:
    """The prompts that differ early from others of the same text, in pieces."""
    trunks = _trunks(prompts)
    num_shingles = sum(len(trunk.hashes) for trunk in trunks)
    largest = (2**64 - 1) // max(1, num_shingles // MAX_SHINGLES)
    groups, mixed = _apart(_groups([(trunk, trunk.fingerprint(largest)) for trunk in trunks]))
    layouts: list[Layout] = [_read(group, tokenizer) for group in groups if len(group) > 1]
    return [*layouts, *([_mixed_layout(mixed, tokenizer)] if mixed else [])]


def _trunks(prompts: list[Prompt]) -> list[Trunk]:
    """The trunks of the prompts with enough repeated text, those of most rows first."""
    hashes = [shingles(prompt.symbols) for prompt in prompts]
    repeated = repeated_symbols(prompts, hashes)
    sizes = [int(np.append(0, mask.nonzero()[0] + 1)[-1]) for mask in repeated]
    rows: dict[bytes, list[int]] = {}
    for index, (prompt, mask, size) in enumerate(zip(prompts, repeated, sizes, strict=True)):
        if np.count_nonzero(mask) >= MIN_REPEATED:
            rows.setdefault(prompt.ids[: prompt.places[size]].tobytes(), []).append(index)
    trunks = []
    for first, *others in rows.values():
        size = sizes[first]
        own = hashes[first][: max(0, size - SHINGLE + 1)]
        trunks.append(Trunk(prompts[first], size, (first, *others), own, repeated[first][:size]))
    return sorted(trunks, key=lambda trunk: -len(trunk.rows))


def _groups(trunks: list[tuple[Trunk, set[int]]]) -> list[tuple[list[Trunk], set[int]]]:
    """Trunks that have half their fingerprint, or more, in common with the first of their group; and that one's."""
    groups: list[tuple[list[Trunk], set[int]]] = []
    groups_with: dict[int, list[int]] = {}
    for trunk, own in trunks:
        counts = Counter(group for value in own for group in groups_with.get(value, ()))
        best, count = counts.most_common(1)[0] if counts else (-1, 0)
        if count and count >= MIN_ALIKE * len(own):
            groups[best][0].append(trunk)
            continue
        for value in own:
            groups_with.setdefault(value, []).append(len(groups))
        groups.append(([trunk], own))
    return groups


def _apart(groups: list[tuple[list[Trunk], set[int]]]) -> tuple[list[list[Trunk]], list[Trunk]]:
    """The groups with a text of their own, and the trunks of those that are put together from the texts of others."""
    num_groups = Counter(value for _, own in groups for value in own)
    apart: list[list[Trunk]] = []
    mixed: list[list[Trunk]] = []
    for trunks, own in groups:
        of_others = sum(num_groups[value] > 1 for value in own)
        (mixed if own and of_others >= MIN_MIXED * len(own) else apart).append(trunks)
    return (apart, [trunk for trunks in mixed for trunk in trunks]) if len(mixed) > 2 else (apart + mixed, [])


def _mixed_layout(trunks: list[Trunk], tokenizer: PreTrainedTokenizerBase) -> Layout:
    """What nearly all have in common at their start, and then one difference up to the end of their trunks."""
    common = [_num_equal(trunk.symbols, trunks[0].symbols) for trunk in trunks]
    start = int(np.quantile(common, 0.05, method="lower"))
    alike = [trunk for trunk, shared in zip(trunks, common, strict=True) if shared >= start]
    layout: dict[Trunk, list[Piece]] = {trunk: [] for trunk in alike}
    _add_common_text(layout, dict.fromkeys(alike, start))
    _add_difference(layout, dict.fromkeys(alike, start), {trunk: trunk.size for trunk in alike}, tokenizer)
    return layout


def _read(trunks: list[Trunk], tokenizer: PreTrainedTokenizerBase) -> Layout:
    """All trunks at once from their start. The first one, which most rows have, is the model of the others."""
    layout: dict[Trunk, list[Piece]] = {trunk: [] for trunk in trunks}
    waiting: list[Cursors] = [dict.fromkeys(trunks, 0)]
    while waiting:
        cursors = {trunk: at for trunk, at in waiting.pop().items() if trunk.size - at >= MIN_RUN}
        if len(cursors) > 1 and _num_rows(cursors) >= MIN_COVER * _num_rows(trunks):
            starts, parted = _after_common_text(cursors)
            if starts != cursors:
                _add_common_text(layout, starts)
            ends = _where_they_meet(starts, parted)
            if len(ends) == len(starts):
                _add_difference(layout, starts, ends, tokenizer)
                waiting.append(ends)
            else:
                waiting.append({trunk: at for trunk, at in starts.items() if trunk not in ends})
                waiting.append({trunk: at for trunk, at in starts.items() if trunk in ends})
    return layout


def _after_common_text(cursors: Cursors) -> tuple[Cursors, Cursors]:
    """The word in which the first of them differs, and the symbol."""
    model, start = next(iter(cursors.items()))
    size = min(_num_equal(trunk.symbols[at:], model.symbols[start:]) for trunk, at in cursors.items())
    borders = np.logical_and.reduce([trunk.prompt.starts[at : at + size + 1] for trunk, at in cursors.items()])
    whole = int(np.append(0, borders.nonzero()[0])[-1])
    if not whole and size >= MIN_RUN:  # a script without blanks
        whole = size
    return {trunk: at + whole for trunk, at in cursors.items()}, {trunk: at + size for trunk, at in cursors.items()}


def _where_they_meet(starts: Cursors, parted: Cursors) -> Cursors:
    """Where the difference ends, in the trunks that have text of the model after it."""
    model, *others = starts
    common = {trunk: _common_words(trunk, parted[trunk], model, parted[model]) for trunk in others}
    group = [trunk for trunk in others if len(common[trunk].own)]
    ends, place = {model: parted[model]}, -1
    while group and place < ends[model]:
        place = ends[model]
        crossed = [trunk for trunk in group if not (common[trunk].meetings >= place).any()]
        if _num_rows(crossed) > MIN_MOVED * _num_rows([model, *group]):
            ends = {trunk: trunk.size for trunk in (model, *group)}
            break
        group = [trunk for trunk in group if trunk not in crossed]
        if group:
            nearest = {trunk: int(common[trunk].meetings[common[trunk].meetings >= place][0]) for trunk in group}
            repeats = [len(trunk.rows) for trunk in group]
            farthest = int(np.quantile(np.repeat([*nearest.values()], repeats), MOST, method="higher"))
            group = [trunk for trunk in group if nearest[trunk] <= farthest]
            ends = {model: farthest} | {trunk: common[trunk].own_of(nearest[trunk]) for trunk in group}
    return _first_common_words(starts, _own_text(starts, ends) if group else ends)


def _own_text(starts: Cursors, ends: Cursors) -> Cursors:
    """The end of the few words that are each one's own, before texts in another order: a difference by themselves."""
    if max(end - starts[trunk] for trunk, end in ends.items()) <= MAX_SMALL:
        return ends
    model, *others = ends
    own_ends: Cursors = {}
    for trunk, other in [(model, others[0]), *((trunk, model) for trunk in others)]:
        start, end = starts[trunk], min(ends[trunk], len(trunk.hashes))
        recurs = np.isin(trunk.hashes[start:end], other.hashes) & trunk.prompt.starts[start:end]
        size = int(np.append(recurs, True).argmax())
        own_ends |= {trunk: start + size} if 0 < size <= MAX_SMALL else {}
    return own_ends if _num_rows(own_ends) >= MOST * _num_rows(ends) else ends


class _CommonWords(NamedTuple):
    """Words at which the same text goes on in a trunk and in the model. own, other: their symbols, in own order."""

    own: IntArray
    other: IntArray

    @property
    def meetings(self) -> IntArray:
        """Those of `other` where nothing that is before in one text is after it in the other."""
        highest_before = np.maximum.accumulate(np.append(-1, self.other))[:-1]
        lowest_after = np.minimum.accumulate(self.other[::-1])[::-1]
        return self.other[(highest_before < self.other) & (lowest_after == self.other)]

    def own_of(self, place: int) -> int:
        return int(self.own[self.other == place][0])


def _common_words(trunk: Trunk, start: int, model: Trunk, model_start: int) -> _CommonWords:
    """After these symbols, in texts of 20 symbols or more that both have. A shingle that one has twice is left out."""
    (own_hashes, own_places), (hashes, places) = trunk.unique_shingles, model.unique_shingles
    _, own_indices, indices = np.intersect1d(own_hashes, hashes, assume_unique=True, return_indices=True)
    own, other = own_places[own_indices], places[indices]
    ahead = (own >= start) & (other >= model_start)
    order = own[ahead].argsort()
    own, other = own[ahead][order], other[ahead][order]
    text = np.cumsum(np.append(False, (np.diff(own - other) != 0) | (np.diff(own) > SHINGLE))[: len(own)])
    first, last = text.searchsorted(text), text.searchsorted(text, side="right") - 1
    is_word = trunk.prompt.starts[own] & model.prompt.starts[other]
    chosen = is_word & (own[last] - own[first] + SHINGLE >= MIN_RUN) if len(own) else is_word
    return _CommonWords(own[chosen], other[chosen])


def _first_common_words(starts: Cursors, ends: Cursors) -> Cursors:
    """The first word of a small difference that all have; the ends if there is none, or the difference is large."""
    model, *others = ends
    if not others or max(end - starts[trunk] for trunk, end in ends.items()) > MAX_SMALL:
        return ends
    words = _words(model, starts[model], ends[model])
    places: list[dict[int, int]] = []
    for trunk in others:
        own = _words(trunk, starts[trunk], ends[trunk])
        matcher = SequenceMatcher(None, [word for _, word in own], [word for _, word in words], autojunk=False)
        blocks = matcher.get_matching_blocks()
        places.append({words[b + n][0]: own[a + n][0] for a, b, size in blocks for n in range(size)})
    common = set(places[0]).intersection(*places[1:])
    if not common:
        return ends
    return {model: min(common)} | {trunk: of[min(common)] for trunk, of in zip(others, places, strict=True)}


def _words(trunk: Trunk, start: int, end: int) -> list[tuple[int, tuple[int, ...]]]:
    """Each word of a stretch and where it starts."""
    borders = [start, *(trunk.prompt.starts[start + 1 : end].nonzero()[0] + start + 1).tolist(), end]
    return [(a, tuple(trunk.symbols[a:b].tolist())) for a, b in pairwise(borders)] if end > start else []


def _num_rows(trunks: Iterable[Trunk]) -> int:
    return sum(len(trunk.rows) for trunk in trunks)


def _add_common_text(layout: dict[Trunk, list[Piece]], ends: Cursors) -> None:
    """The same symbols. Tokens that most rows do not have differ in their blanks, which is a difference of its own."""
    stretches = {}
    for trunk, last in ends.items():
        places = trunk.prompt.places
        stretches[trunk] = _end_of(layout[trunk]), int(places[last - 1]) + 1
    texts: Counter[bytes] = Counter()
    for trunk, (start, end) in stretches.items():
        texts[trunk.prompt.ids[start:end].tobytes()] += len(trunk.rows)
    usual = np.frombuffer(texts.most_common(1)[0][0], dtype=np.int64)
    for trunk, (start, end) in stretches.items():
        own = trunk.prompt.ids[start:end]
        if np.array_equal(own, usual):
            layout[trunk].append(Piece(start, end))
            continue
        same = min(_num_equal(own, usual), len(own) - 1, len(usual) - 1)
        blanks = Difference(WHITE_SPACE, usual[same:], usual[same:].tobytes(), is_majority=True)
        layout[trunk] += [Piece(start, start + same), Piece(start + same, end, own[same:].tobytes(), blanks)]


def _num_equal(one: IntArray, other: IntArray) -> int:
    """Symbols or tokens with which both begin."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def _end_of(pieces: list[Piece]) -> int:
    return pieces[-1].end if pieces else 0


def _add_difference(
    layout: dict[Trunk, list[Piece]], starts: Cursors, ends: Cursors, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Blanks around a value belong to it: a tokenizer joins them to what follows."""
    trunks_of: dict[bytes, list[Trunk]] = {}
    for trunk, last in ends.items():
        trunks_of.setdefault(trunk.symbols[starts[trunk] : last].tobytes(), []).append(trunk)
    values = [_value(same, starts[same[0]], ends[same[0]], layout, tokenizer) for same in trunks_of.values()]
    usual_value, most = max(trunks_of.items(), key=lambda item: _num_rows(item[1]))
    usual = most[0].prompt.ids[_end_of(layout[most[0]]) : _end_of_value(most[0], ends[most[0]])]
    difference = Difference(cause_of(values), usual, usual_value, 2 * _num_rows(most) > _num_rows(ends))
    for value, same in trunks_of.items():
        for trunk in same:
            start, end = _end_of(layout[trunk]), _end_of_value(trunk, ends[trunk])
            layout[trunk].append(Piece(start, end, value, difference))


def _end_of_value(trunk: Trunk, last: int) -> int:
    places = trunk.prompt.places
    return int(places[last]) if last < trunk.size else int(places[trunk.size - 1]) + 1


def _value(trunks: list[Trunk], first: int, last: int, layout: Layout, tokenizer: PreTrainedTokenizerBase) -> Value:
    """What these trunks have between two symbols, the same in all of them."""
    trunk = trunks[0]
    ids, start, end = trunk.prompt.ids, _end_of(layout[trunk]), _end_of_value(trunk, last)
    repeated = trunk.repeated[first:last]
    return Value(
        text=text_of_run(tokenizer, ids, start, min(end, start + MAX_VALUE)),
        before=text_of_run(tokenizer, ids, max(0, start - CONTEXT), start),
        after=text_of_run(tokenizer, ids, end, min(len(ids), end + CONTEXT)),
        symbols=trunk.symbols[first:last],
        num_rows=_num_rows(trunks),
        repeated=float(repeated.mean()) if len(repeated) else 0.0,
    )
