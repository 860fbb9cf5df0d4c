"""What breaks sharing: at which token near-identical prompts part, why, and what that costs.

prompts --find_families--> versions of one text --find_layout--> differences with causes --rearranged--> tokens saved
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from radixtrain.data.sample import Sample
from radixtrain.data.tokens.decode import shortened, text_of_run
from radixtrain.report.contents import Break, Example
from radixtrain.report.divergence.alignment import num_equal
from radixtrain.report.divergence.causes import DRAWN, WHITE_SPACE, Cause
from radixtrain.report.divergence.families import Member, find_families
from radixtrain.report.divergence.prompts import Prompt, draw_prompts
from radixtrain.report.divergence.rearranged import num_unique_tokens, rearranged
from radixtrain.report.divergence.slots import Layout, Piece, find_layout, symbols_of, tokens_of
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["find_breaks"]

MIN_SAVED = 0.01  # of the computed prompt tokens: less is not worth a line
NUM_EXAMPLES = 3
CONTEXT = 24  # tokens of an example before and after the value
MAX_CHARACTERS = 240  # of a value in an example

_VALUE = re.compile(r"(\S.*?)[.,;:]*\s*$", re.DOTALL)  # without the blanks and the punctuation around it
_BLANKS = re.compile(r"(\s+)")
_SIGNS = {ord(" "): "·", ord("\t"): "→", ord("\r"): "␍", ord("\n"): "↵"}


def find_breaks(
    conversations: Sequence[Sequence[Sample]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 32,
    *,
    max_conversations: int = 2000,
) -> tuple[Break, ...]:
    """Why near-identical prompts part early: the causes, the most expensive first.

    conversations: the samples of each. A prompt is what precedes the first label of a conversation's first sample; text
        without a prompt has no breaks.
    batch_size: conversations of an optimizer step.
    max_conversations: that are drawn, with a fixed seed; and no more than have two million prompt tokens together.

    `tokens_saved` counts the unique tokens of the prompts, now and with the cause fixed: a date, an id, a name, a
    number or a text of the row's own moves to the end of the text that the prompts have in common; an order, white
    space or a version becomes what most rows have. It is counted in steps of `batch_size` drawn conversations, since
    sharing ends with a step, and multiplied by the conversations of the epoch over those drawn. The other causes that
    are named count as fixed: after a date, an id costs nothing more, so the figures do not add up, and the advice says
    what one saves by itself. A cause that saves less than 1 % of the computed prompt tokens is not named.

    `num_sequences` is scaled alike: samples that differ from what more than half of them have there; all that have a
    value if no value is as frequent. `num_values` is of the drawn conversations.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    prompts = draw_prompts(conversations, tokenizer, max_conversations)
    layouts = [find_layout(family, tokenizer) for family in find_families(prompts)]
    findings = _by_cause(layouts)
    costs = _Costs(prompts, layouts, batch_size, len(conversations) / max(1, len(prompts)))
    named = costs.worth_naming(tuple(finding.cause.name for finding in findings))
    breaks = [_break(finding, named, costs, tokenizer) for finding in findings if finding.cause.name in named]
    return tuple(sorted(breaks, key=lambda each: -each.tokens_saved))


@dataclass(frozen=True, eq=False)
class _Finding:
    """A cause, the places of the prompts that it touches, several in one prompt perhaps, and how many values it has."""

    cause: Cause
    places: list[tuple[Member, Piece]]
    num_values: int


def _by_cause(layouts: list[Layout]) -> list[_Finding]:
    found: dict[str, _Finding] = {}
    for finding in (finding for layout in layouts for finding in (*_slots(layout), *_blanks(layout))):
        same = found.setdefault(finding.cause.name, _Finding(finding.cause, [], 0))
        places, num_values = same.places + finding.places, same.num_values + finding.num_values
        found[finding.cause.name] = _Finding(finding.cause, places, num_values)
    return list(found.values())


def _slots(layout: Layout) -> Iterator[_Finding]:
    causes = {piece.slot.cause for pieces in layout.pieces.values() for piece in pieces if piece.slot is not None}
    causes -= {DRAWN} if _ends_alike(layout) else set()
    for cause in sorted(causes, key=lambda cause: cause.name):
        places, forms = [], set()
        for member, pieces in layout.pieces.items():
            found = [(piece.slot, piece) for piece in pieces if piece.slot is not None and piece.slot.cause is cause]
            texts = [(slot.key, symbols_of(member, piece)) for slot, piece in found]
            places += [(member, piece) for slot, piece in found if slot.touches(symbols_of(member, piece))]
            if texts and (not cause.moves or any(len(symbols) for _, symbols in texts)):
                forms.add(tuple((key, symbols.tobytes()) for key, symbols in texts))
        if places:
            yield _Finding(cause, places, len(forms))


def _ends_alike(layout: Layout) -> bool:
    """Whether most prompts end with the same tokens after what was aligned: then no question follows any examples.

    What looks like drawn examples is then what is asked about, as code is that repeats common lines.
    """
    tails = Counter(
        member.trunk.prompt.ids[pieces[-1].end :].tobytes() for member, pieces in layout.pieces.items() if pieces
    )
    return bool(tails) and 2 * max(tails.values()) > tails.total()


def _blanks(layout: Layout) -> Iterator[_Finding]:
    """The members whose common text is not token for token what most rows have, at the first place."""
    places, forms = [], set()
    for member, pieces in layout.pieces.items():
        common = [piece for piece in pieces if piece.slot is None]
        forms.add(tuple((piece.key, tokens_of(member, piece).tobytes()) for piece in common))
        other = [piece for piece in common if not np.array_equal(tokens_of(member, piece), layout.usual[piece.key])]
        if other:
            places.append((member, _first_blank(member, other[0], layout.usual[other[0].key])))
    if places:
        yield _Finding(WHITE_SPACE, places, len(forms))


def _first_blank(member: Member, piece: Piece, usual: IntArray) -> Piece:
    """The part of a piece with its first other blank: the first token that differs, and some that follow."""
    ids = tokens_of(member, piece)
    start = piece.start + min(num_equal(ids, usual), len(ids) - 1, len(usual) - 1)
    return replace(piece, start=start, end=min(start + 4, piece.end))


class _Costs:
    """Unique tokens of an epoch's prompts, with some causes fixed."""

    def __init__(self, prompts: list[Prompt], layouts: list[Layout], batch_size: int, scale: float):
        self.prompts, self.layouts, self.batch_size, self.scale = prompts, layouts, batch_size, scale
        self._known: dict[frozenset[str], int] = {}
        self.now = self.fixed(())

    def fixed(self, names: Iterable[str]) -> int:
        key = frozenset(names)
        if key not in self._known:
            sequences = rearranged(self.prompts, self.layouts, key)
            self._known[key] = round(self.scale * num_unique_tokens(sequences, self.batch_size))
        return self._known[key]

    def saved(self, name: str, named: tuple[str, ...]) -> int:
        """By this cause, once the others of `named` are fixed."""
        return self.fixed(set(named) - {name}) - self.fixed(named)

    def worth_naming(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those that save enough beside the others, the cheapest taken away first."""
        while names:
            saved, name = min((self.saved(name, names), name) for name in names)
            if saved >= max(1, MIN_SAVED * self.now):
                break
            names = tuple(other for other in names if other != name)
        return names


def _break(finding: _Finding, named: tuple[str, ...], costs: _Costs, tokenizer: PreTrainedTokenizerBase) -> Break:
    rows = {row for member, _ in finding.places for row in member.trunk.rows}
    starts = [(piece.start, len(member.trunk.rows)) for member, piece in finding.places]
    name = finding.cause.name
    saved = costs.saved(name, named)
    return Break(
        cause=name,
        num_sequences=round(costs.scale * sum(costs.prompts[row].num_samples for row in rows)),
        num_values=finding.num_values,
        at_token=int(np.median(np.repeat(*map(np.array, zip(*starts, strict=True))))),
        tokens_saved=saved,
        advice=finding.cause.advice + _by_itself(name, named, saved, costs),
        examples=tuple(_examples(finding, costs.prompts, tokenizer)),
    )


def _by_itself(name: str, named: tuple[str, ...], saved: int, costs: _Costs) -> str:
    """A sentence on what it saves if no other cause is fixed; empty if that is about as much."""
    only_this = costs.now - costs.fixed((name,))
    if only_this >= 0.8 * saved:
        return ""
    others = " and ".join(other for other in named if other != name)
    return f" By itself this saves {max(0, only_this):,} tokens; the rest takes a fix of {others} too."


def _examples(finding: _Finding, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    """The first prompts with different values."""
    by_tokens: dict[bytes, tuple[Member, Piece]] = {}
    for member, piece in finding.places:
        by_tokens.setdefault(tokens_of(member, piece).tobytes(), (member, piece))
    for member, piece in islice(by_tokens.values(), NUM_EXAMPLES):
        yield _example(prompts[member.trunk.rows[0]], piece, finding.cause is WHITE_SPACE, tokenizer)


def _example(prompt: Prompt, piece: Piece, is_blank: bool, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The value without what surrounds it, or just its blanks, drawn as signs."""
    size = len(prompt.ids)
    text = text_of_run(tokenizer, prompt.ids, piece.start, piece.end)
    found = (_BLANKS if is_blank else _VALUE).search(text)
    start, end = found.span(1) if found else (0, len(text))
    return Example(
        where=prompt.where,
        before=text_of_run(tokenizer, prompt.ids, max(0, piece.start - CONTEXT), piece.start) + text[:start],
        value=shortened(text[start:end].translate(_SIGNS) if is_blank else text[start:end], MAX_CHARACTERS),
        after=text[end:] + text_of_run(tokenizer, prompt.ids, piece.end, min(size, piece.end + CONTEXT)),
    )
