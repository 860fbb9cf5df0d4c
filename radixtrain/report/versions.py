"""Prompts that are versions of one text: what nearly all rows have, in the same order, and the differences between.

Only the trunk of a prompt is read: up to the last text that another prompt computes too. What follows, such as a
question, belongs to the row.

    Today is | Monday  | . You answer letters. Customer | 1044  | , be polite ...
    Today is | 3 March | . You answer letters. Customer | 20991 | , be polite ...
               a date                                     a number

1. Group the trunks: a trunk joins the group whose first trunk has half of a sample of its shingles (`_groups`).
2. Find a group's common texts: runs of shingles that 98 % of its rows have once, in the same order (`_common_texts`).
3. Read each gap between two of them as a difference, whose values tell the cause (`_read_gap`).

All prompts of one text have the same differences, some of them with an empty value. Text that changes places is not
common text, so that tools in another order are one difference, from the first to the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixtrain.data.tokens.decode import text_of_run
from radixtrain.report.causes import DRAWN, MIN_ROWS, SEVERAL, WHITE_SPACE, Cause, Value, cause_of, whole_words
from radixtrain.report.prompts import MIN_RUN, SHINGLE, Flags, Hashes, Prompt, repeated_symbols, runs_of, shingles
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_REPEATED = 48  # symbols of a prompt: questions that follow a pattern repeat fewer
SAMPLE = 32  # shingles of a trunk's repeated text, by which it is compared with others
MIN_ALIKE, MIN_MIXED = 0.5, 0.6  # share of the sample: to be a version of another trunk; to be a mix of several
MIN_COMMON, MIN_IN_ORDER = 0.98, 0.95  # share of rows with a text, for it to be common; and in the same order
CONTEXT, MAX_VALUE = 16, 400  # tokens on either side of a value, and of a value, that are decoded


@dataclass(frozen=True, eq=False)
class Trunk:
    """The beginning of some prompts, the same tokens in all.

    prompt: one of them. rows: all, by index. repeated: (size,), bool. symbols that are computed at several places.
    """

    prompt: Prompt
    rows: list[int]
    repeated: Flags

    @cached_property
    def symbols(self) -> IntArray:
        return self.prompt.symbols[: len(self.repeated)]

    @cached_property
    def hashes(self) -> Hashes:
        return shingles(self.symbols)

    @cached_property
    def sample(self) -> set[int]:
        return set(np.unique(self.hashes[self.repeated[: len(self.hashes)]])[:SAMPLE].tolist())

    def end_token(self, symbol: int, blanks: bool = False) -> int:
        """Return one past the token of the previous symbol; with blanks also past those, if the trunk continues."""
        if blanks and symbol < len(self.symbols):
            return int(self.prompt.places[symbol])
        return int(self.prompt.places[symbol - 1]) + 1 if symbol else 0


class Piece(NamedTuple):
    """Tokens [start, end) of a prompt.

    cause: why rows differ there; None if they do not. usual: the tokens of most rows. value: compared for equality.
    has_other: whether the value differs from that of more than half of the rows; without such a majority, whether it
        is there at all.
    """

    start: int
    end: int
    cause: Cause | None = None
    usual: IntArray = np.zeros(0, dtype=np.int64)
    value: bytes = b""
    has_other: bool = False


Layout = dict[Trunk, list[Piece]]  # of each trunk, one after the other from its start to the end of what is common


def find_layouts(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Layout]:
    """Cut the prompts that differ early from others of the same text into pieces."""
    *apart, mixed = _groups(_trunks(prompts))
    return [_one_entry(_layout(group, group is mixed, tokenizer)) for group in (*apart, mixed) if len(group) > 1]


def _trunks(prompts: list[Prompt]) -> list[Trunk]:
    """Return the trunks of prompts with enough repeated text, the one with most rows first."""
    trunks: dict[bytes, Trunk] = {}
    for row, (prompt, repeated) in enumerate(zip(prompts, repeated_symbols(prompts), strict=True)):
        if np.count_nonzero(repeated) >= MIN_REPEATED:
            size = int(repeated.nonzero()[0][-1]) + 1
            trunk = Trunk(prompt, [], repeated[:size])
            trunks.setdefault(prompt.ids[: prompt.places[size]].tobytes(), trunk).rows.append(row)
    return sorted(trunks.values(), key=lambda trunk: -len(trunk.rows))


def _groups(trunks: list[Trunk]) -> list[list[Trunk]]:
    """Group trunks that are versions of the first in their group; the last group has those made of several texts."""
    groups: list[list[Trunk]] = []
    texts: list[set[int]] = []
    for trunk in trunks:
        alike = [len(trunk.sample & text) for text in texts]
        if alike and max(alike) >= MIN_ALIKE * len(trunk.sample):
            groups[alike.index(max(alike))].append(trunk)
        else:
            groups.append([trunk])
            texts.append(set(trunk.hashes.tolist()))
    num_texts = Counter(shingle for text in texts for shingle in text)
    mixed = [group for group in groups if np.mean([num_texts[each] > 1 for each in group[0].sample]) >= MIN_MIXED]
    if len(mixed) < 3:
        return [*groups, []]
    return [*(group for group in groups if group not in mixed), [trunk for group in mixed for trunk in group]]


def _layout(trunks: list[Trunk], is_mixed: bool, tokenizer: PreTrainedTokenizerBase) -> Layout:
    """Cut all trunks into pieces, except those that lack a text which nearly all have.

    is_mixed: whether they are made of several texts. Only then their ends may be drawn from a pool.
    """
    texts = _common_texts(trunks)
    layout: Layout = {trunk: [] for trunk in texts}
    num_gaps = len(next(iter(texts.values()))) - 1
    for number in range(num_gaps):
        gaps = {trunk: slice(own[number][1], own[number + 1][0]) for trunk, own in texts.items()}
        _read_gap(layout, gaps, number == num_gaps - 1, is_mixed, tokenizer)
    return layout


def _one_entry(layout: Layout) -> Layout:
    """Merge differences between several prompts into one cause, also where only some differ, or by a name.

    A difference independent of the prompt, as a date or a stray version in the rows of each, is a cause of its own: its
    combinations with the prompts are as many as their product, not their sum.
    """
    places = list(zip(*layout.values(), strict=True))
    meant = [[piece.value for piece in place] for place in places if place[0].cause == SEVERAL]
    prompts, num_rows = list(zip(*meant, strict=True)), _num_rows(layout)
    for index, place in enumerate(places if prompts else ()):
        values = [piece.value for piece in place]
        together = len(set(zip(prompts, values, strict=True)))
        is_nested = together < len(set(prompts)) + len(set(values)) and num_rows >= MIN_ROWS * together
        if place[0].cause not in (None, WHITE_SPACE) and is_nested:
            for pieces in layout.values():
                pieces[index] = pieces[index]._replace(cause=SEVERAL)
    return layout


def _common_texts(trunks: list[Trunk]) -> dict[Trunk, list[tuple[int, int]]]:
    """Return (start, end) of what nearly all rows have at the same rank among such texts, the same for each trunk.

    Before them (0, 0), and after them the end of the trunk. A shingle that a trunk has twice is not common.
    """
    num_rows = np.array([len(trunk.rows) for trunk in trunks])
    hashes = [np.unique(trunk.hashes, return_counts=True) for trunk in trunks]
    once = [values[counts == 1] for values, counts in hashes]
    values, indices = np.unique(np.concatenate(once), return_inverse=True)
    rows = np.bincount(indices, np.repeat(num_rows, [len(own) for own in once]))
    common = values[rows >= MIN_COMMON * num_rows.sum()]
    ranked: dict[Trunk, dict[tuple[int, int], tuple[int, int]]] = {}
    found: Counter[tuple[int, int]] = Counter()
    for trunk in trunks:
        runs = ((start, last + SHINGLE - 1) for start, last in runs_of(np.isin(trunk.hashes, common)))
        texts = enumerate((start, end) for start, end in runs if end - start >= MIN_RUN)
        ranked[trunk] = {(rank, int(trunk.hashes[text[0]])): text for rank, text in texts}
        found.update(dict.fromkeys(ranked[trunk], len(trunk.rows)))
    kept = [key for key, count in found.items() if count >= MIN_IN_ORDER * num_rows.sum()]
    whole = [trunk for trunk, own in ranked.items() if all(key in own for key in kept)]
    if not whole:  # each lacks another one
        whole, kept = trunks, []
    bounds = np.array([[(0, 0), *sorted(ranked[trunk][key] for key in kept)] for trunk in whole])
    bounds[:, 1:, 0] += (bounds[:, :-1, 1] - bounds[:, 1:, 0]).max(axis=0).clip(0)  # "very" begins and ends "very very"
    return {trunk: [*own, (len(trunk.symbols),) * 2] for trunk, own in zip(whole, bounds.tolist(), strict=True)}


def _read_gap(
    layout: Layout, gaps: dict[Trunk, slice], is_last: bool, is_mixed: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Add the common text before a difference, which begins where the first row differs, and the difference."""
    texts = [trunk.symbols[gap] for trunk, gap in gaps.items()]
    before = min(num_equal(text, texts[0]) for text in texts)
    gaps = {trunk: slice(gap.start + before, gap.stop) for trunk, gap in gaps.items()}
    ends = {trunk: trunk.end_token(gap.start) for trunk, gap in gaps.items()}
    alike = _by_value({trunk: trunk.prompt.ids[_end_of(layout[trunk]) : end] for trunk, end in ends.items()})
    _add(layout, ends, alike, WHITE_SPACE if len(alike) > 1 else None)
    ends = {trunk: trunk.end_token(gap.stop, blanks=True) for trunk, gap in gaps.items()}
    alike = _by_value({trunk: trunk.symbols[gap] for trunk, gap in gaps.items()})
    if len(alike) > 1:
        cause = cause_of(
            [_value(same, gaps[same[0]], _end_of(layout[same[0]]), ends[same[0]], tokenizer) for same in alike.values()]
        )
        is_own = cause.moves or (cause == DRAWN and (not is_mixed or _is_asked_about(gaps)))
        if not (is_last and is_own):
            _add(layout, ends, alike, cause)


def _by_value(values: dict[Trunk, IntArray]) -> dict[bytes, list[Trunk]]:
    """Group the trunks by value, the value of most rows first."""
    alike: dict[bytes, list[Trunk]] = {}
    for trunk, value in values.items():
        alike.setdefault(value.tobytes(), []).append(trunk)
    return dict(sorted(alike.items(), key=lambda item: -_num_rows(item[1])))


def _num_rows(trunks: Iterable[Trunk]) -> int:
    return sum(len(trunk.rows) for trunk in trunks)


def _is_asked_about(gaps: dict[Trunk, slice]) -> bool:
    """Return whether what looks like drawn examples is short, or most prompts end alike after it."""
    tails = Counter(trunk.prompt.ids[trunk.end_token(gap.stop) :].tobytes() for trunk, gap in gaps.items())
    is_short = np.median([gap.stop - gap.start for gap in gaps.values()]) < MIN_REPEATED
    return bool(is_short) or 2 * max(tails.values()) > tails.total()


def _add(layout: Layout, ends: dict[Trunk, int], alike: dict[bytes, list[Trunk]], cause: Cause | None) -> None:
    """Add a piece of each trunk up to these tokens. alike: the trunks of each value."""
    (usual, most), *_ = alike.items()
    tokens = most[0].prompt.ids[_end_of(layout[most[0]]) : ends[most[0]]]
    is_majority = 2 * _num_rows(most) > _num_rows(layout)
    for value, trunks in alike.items():
        has_other = value != usual if is_majority else bool(value) or not (cause and cause.moves)
        for trunk in trunks:
            layout[trunk].append(Piece(_end_of(layout[trunk]), ends[trunk], cause, tokens, value, has_other))


def _value(trunks: list[Trunk], gap: slice, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> Value:
    """Return what these trunks have at these symbols and tokens, the same in all of them."""
    ids, repeated = trunks[0].prompt.ids, trunks[0].repeated[gap]
    text = text_of_run(tokenizer, ids, start, min(end, start + MAX_VALUE))
    text, before = whole_words(text, text_of_run(tokenizer, ids, max(0, start - CONTEXT), start))
    return Value(
        text=text,
        before=before,
        after=text_of_run(tokenizer, ids, end, min(len(ids), end + CONTEXT)),
        symbols=trunks[0].symbols[gap],
        num_rows=_num_rows(trunks),
        repeated=float(repeated.mean()) if len(repeated) else 0.0,
    )


def _end_of(pieces: list[Piece]) -> int:
    return pieces[-1].end if pieces else 0


def num_equal(one: IntArray, other: IntArray) -> int:
    """Count the symbols or tokens with which both begin."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size
