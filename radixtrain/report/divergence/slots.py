"""The places where the prompts of a family differ, and what stands there in each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from radixtrain.data.tokens.decode import text_of_run
from radixtrain.report.divergence.causes import Cause, Value, cause_of
from radixtrain.report.divergence.families import Family, Member
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Layout", "Piece", "Slot", "find_layout", "symbols_of", "tokens_of"]

CONTEXT = 16  # tokens on either side of a value that are decoded
MAX_VALUE = 400  # tokens of a value that are decoded

Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of the prompt of a member.

    key: the stretch of the model that it answers to. slot: the difference that it is; None for common text.
    first, last: its symbols, [first, last). start, end: its tokens, [start, end).
    """

    key: Key
    slot: Slot | None
    first: int
    last: int
    start: int
    end: int


def tokens_of(member: Member, piece: Piece) -> IntArray:
    return member.trunk.prompt.ids[piece.start : piece.end]


def symbols_of(member: Member, piece: Piece) -> IntArray:
    return member.trunk.symbols[piece.first : piece.last]


@dataclass(frozen=True, eq=False)
class Slot:
    """A place where the members differ.

    cause: what stands there.
    usual, usual_symbols: what most rows have there, as tokens and as symbols; is_majority: more than half of them.
    """

    key: Key
    cause: Cause
    usual: IntArray
    usual_symbols: IntArray
    is_majority: bool

    def touches(self, symbols: IntArray) -> bool:
        """Whether a row with these symbols there has to change: it differs from the majority, or there is none."""
        if self.is_majority:
            return not np.array_equal(symbols, self.usual_symbols)
        return len(symbols) > 0 or not self.cause.moves


@dataclass(frozen=True, eq=False)
class Layout:
    """A family in pieces.

    pieces: of each member, one after the other from the start of its prompt to the end of the common text.
    usual: the tokens of each stretch of common text that most rows have: only blanks differ there.
    """

    pieces: dict[Member, list[Piece]]
    usual: dict[Key, IntArray]


def find_layout(family: Family, tokenizer: PreTrainedTokenizerBase) -> Layout:
    """The family in pieces, and the cause of each difference."""
    keys = _merged({gap for member in family.members for gap in _gaps(member)})
    slots = {key: slot for key in keys if (slot := _slot(key, family, tokenizer)) is not None}
    pieces = {member: list(_pieces(member, slots, family.end)) for member in family.members}
    return Layout(pieces, _usual(pieces))


def _usual(pieces: dict[Member, list[Piece]]) -> dict[Key, IntArray]:
    counts: dict[Key, Counter[bytes]] = {}
    for member, each in pieces.items():
        for piece in each:
            if piece.slot is None:
                counts.setdefault(piece.key, Counter())[tokens_of(member, piece).tobytes()] += len(member.trunk.rows)
    return {key: np.frombuffer(count.most_common(1)[0][0], dtype=np.int64) for key, count in counts.items()}


def _gaps(member: Member) -> Iterator[Key]:
    """The stretches of the model between those that the member has too."""
    blocks = member.alignment.blocks
    if blocks and (blocks[0].start or blocks[0].model):
        yield 0, blocks[0].model
    for one, other in pairwise(blocks):
        if one.end < other.start or one.model_end < other.model:
            yield one.model_end, other.model
    last = blocks[-1].model_end if blocks else 0
    if last < member.reach:
        yield last, member.reach


def _merged(gaps: set[Key]) -> list[Key]:
    """The union of stretches, those joined that overlap or touch."""
    merged: list[Key] = []
    for start, end in sorted(gaps):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _slot(key: Key, family: Family, tokenizer: PreTrainedTokenizerBase) -> Slot | None:
    """None if all members that reach the place have the same there."""
    members: dict[bytes, list[Member]] = {}
    for member in family.members:
        if _passes(member, key, family.end):
            members.setdefault(symbols_of(member, _slot_piece(member, key, None)).tobytes(), []).append(member)
    values = [_value(key, same, tokenizer) for same in members.values()]
    cause = cause_of(values)
    if cause is None:
        return None
    rows, most = max(((_num_rows(same), same[0]) for same in members.values()), key=lambda pair: pair[0])
    piece = _slot_piece(most, key, None)
    return Slot(
        key=key,
        cause=cause,
        usual=tokens_of(most, piece),
        usual_symbols=symbols_of(most, piece),
        is_majority=2 * rows > sum(map(_num_rows, members.values())),
    )


def _num_rows(members: list[Member]) -> int:
    return sum(len(member.trunk.rows) for member in members)


def _passes(member: Member, key: Key, family_end: int) -> bool:
    """Whether the member has common text after the slot, or the slot is the end of all common text."""
    return member.reach > key[1] or member.reach == key[1] == family_end


def _value(key: Key, members: list[Member], tokenizer: PreTrainedTokenizerBase) -> Value:
    """What these members, which have the same symbols there, have in a slot."""
    member = members[0]
    piece, ids = _slot_piece(member, key, None), member.trunk.prompt.ids
    end = min(piece.end, piece.start + MAX_VALUE)
    repeated = member.trunk.repeated[piece.first : piece.last]
    return Value(
        text=text_of_run(tokenizer, ids, piece.start, end),
        before=text_of_run(tokenizer, ids, max(0, piece.start - CONTEXT), piece.start),
        after=text_of_run(tokenizer, ids, piece.end, min(len(ids), piece.end + CONTEXT)),
        symbols=symbols_of(member, piece),
        num_rows=_num_rows(members),
        repeated=float(repeated.mean()) if len(repeated) else 0.0,
    )


def _pieces(member: Member, slots: dict[Key, Slot], family_end: int) -> Iterator[Piece]:
    """Up to the first slot that the member does not reach the end of."""
    at, end = 0, member.reach
    for key, slot in slots.items():
        if not _passes(member, key, family_end):
            end = min(end, key[0])
            break
        if at < key[0]:
            yield _common_piece(member, (at, key[0]))
        yield _slot_piece(member, key, slot)
        at = key[1]
    if at < end:
        yield _common_piece(member, (at, end))


def _common_piece(member: Member, key: Key) -> Piece:
    first, last = member.alignment.end_of(key[0]), member.alignment.start_of(key[1])
    places = member.trunk.prompt.places
    return Piece(key, None, first, last, int(places[first]) if first else 0, int(places[last - 1]) + 1)


def _slot_piece(member: Member, key: Key, slot: Slot | None) -> Piece:
    """Blanks around a value belong to it: a tokenizer joins them to what follows."""
    first, last = member.alignment.start_of(key[0]), member.alignment.end_of(key[1])
    places, size = member.trunk.prompt.places, member.trunk.size
    start = int(places[first - 1]) + 1 if first else 0
    return Piece(key, slot, first, last, start, int(places[last]) if last < size else int(places[size - 1]) + 1)
