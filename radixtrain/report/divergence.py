"""What breaks sharing: at which token near-identical prompts part, why, and what that costs.

prompts --versions.py--> common text and differences, each with its cause ----> tokens saved if the cause is fixed
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from radixtrain.data.sample import Sample
from radixtrain.data.tokens.decode import shortened, text_of_run
from radixtrain.report.causes import DRAWN, WHITE_SPACE, Cause
from radixtrain.report.contents import Break, Example
from radixtrain.report.prompt_text import Prompt, draw_prompts
from radixtrain.report.versions import Layout, Piece, Trunk, find_layouts
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import sort_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONVERSATIONS = 2000
MIN_SAVED = 0.01  # of the computed prompt tokens: less is not worth a line
NUM_EXAMPLES = 3
CONTEXT = 24  # tokens of an example before and after the value
MAX_BLANKS = 4  # tokens of an example of white space
MAX_CHARACTERS = 240  # of a value in an example

_VALUE = re.compile(r"(\S.*?)[.,;:]*\s*$", re.DOTALL)  # without the blanks and the punctuation around it
_BLANKS = re.compile(r"(\s+)")
_SIGNS = {ord(" "): "·", ord("\t"): "→", ord("\r"): "␍", ord("\n"): "↵"}


def find_breaks(
    conversations: Sequence[Sequence[Sample]], tokenizer: PreTrainedTokenizerBase, batch_size: int = 32
) -> tuple[Break, ...]:
    """Why near-identical prompts part early: the causes, the most expensive first.

    conversations: the samples of each. A prompt is what precedes the first label of a conversation's first sample; text
        without a prompt has no breaks. Of 2,000 at most, drawn with a fixed seed, and of two million prompt tokens.
    batch_size: conversations of an optimizer step, at least 1.

    `tokens_saved` counts the unique tokens of the prompts, now and with the cause fixed: a date, an id, a name, a
    number or a text of the row's own moves to the end of the text that the prompts have in common; an order, white
    space or a version becomes what most rows have. It is counted in steps of `batch_size` drawn conversations, since
    sharing ends with a step, and multiplied by the conversations of the epoch over those drawn. The other causes that
    are named count as fixed: after a date, an id costs nothing more, so the figures do not add up, and the advice says
    what one saves by itself. A cause that saves less than 1 % of the computed prompt tokens is not named.

    `num_sequences` is scaled alike: samples that differ from what more than half of them have there; all that have a
    value if no value is as frequent. `num_values` is of the drawn conversations.
    """
    prompts = draw_prompts(conversations, tokenizer, MAX_CONVERSATIONS)
    layouts = find_layouts(prompts, tokenizer)
    findings = _by_cause(layouts)
    costs = _Costs(prompts, layouts, batch_size, len(conversations) / max(1, len(prompts)))
    named = costs.worth_naming(tuple(findings))
    breaks = [_break(findings[name], named, costs, tokenizer) for name in named]
    return tuple(sorted(breaks, key=lambda each: -each.tokens_saved))


@dataclass(frozen=True, eq=False)
class _Finding:
    """A cause, the pieces of prompts that have to change, and what the prompts have in all such places."""

    cause: Cause
    places: list[tuple[Trunk, Piece]] = field(default_factory=list)
    values: set[tuple[bytes, ...]] = field(default_factory=set)


def _by_cause(layouts: list[Layout]) -> dict[str, _Finding]:
    findings: dict[str, _Finding] = {}
    for layout in layouts:
        ends_alike = _ends_alike(layout)
        for trunk, pieces in layout.items():
            values: dict[Cause, list[bytes]] = defaultdict(list)
            for piece in pieces:
                difference = piece.difference
                if difference is not None and not (ends_alike and difference.cause is DRAWN):
                    finding = findings.setdefault(difference.cause.name, _Finding(difference.cause))
                    finding.places.extend([(trunk, piece)] if difference.touches(piece.value) else [])
                    values[finding.cause].append(piece.value)
            for cause, own in values.items():
                findings[cause.name].values.update([tuple(own)] if any(own) or not cause.moves else [])
    return {name: finding for name, finding in findings.items() if finding.places}


def _ends_alike(layout: Layout) -> bool:
    """Whether most prompts end with the same tokens after what was read: then no question follows any examples.

    What looks like drawn examples is then what is asked about, as code is that repeats common lines.
    """
    tails = Counter(trunk.prompt.ids[pieces[-1].end :].tobytes() for trunk, pieces in layout.items() if pieces)
    return bool(tails) and 2 * max(tails.values()) > tails.total()


class _Costs:
    """Unique tokens of an epoch's prompts, with some causes fixed."""

    def __init__(self, prompts: list[Prompt], layouts: list[Layout], batch_size: int, scale: float):
        self.prompts, self.layouts, self.batch_size, self.scale = prompts, layouts, batch_size, scale
        self._known: dict[frozenset[str], int] = {}
        self.now = self.fixed(())

    def fixed(self, names: Iterable[str]) -> int:
        key = frozenset(names)
        if key not in self._known:
            sequences, size = self._sequences(key), self.batch_size
            steps = (sequences[start : start + size] for start in range(0, len(sequences), size))
            self._known[key] = round(self.scale * sum(map(_num_unique_tokens, steps)))
        return self._known[key]

    def _sequences(self, names: frozenset[str]) -> list[IntArray]:
        """The tokens of all prompts once these causes are fixed. Moved text is not tokenised again at its borders."""
        sequences = [prompt.ids for prompt in self.prompts]
        for layout in self.layouts:
            for trunk, pieces in layout.items():
                head, moved = [trunk.prompt.ids[:0]], []
                for start, end, _, difference in pieces:
                    own = trunk.prompt.ids[start:end]
                    if difference is None or difference.cause.name not in names:
                        head.append(own)
                    elif difference.cause.moves:
                        moved.append(own)
                    else:
                        head.append(difference.usual)
                end = pieces[-1].end if pieces else 0
                for row in trunk.rows:
                    sequences[row] = np.concatenate([*head, *moved, self.prompts[row].ids[end:]])
        return sequences

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


def _num_unique_tokens(sequences: list[IntArray]) -> int:
    bounds = cumulative(np.array([len(ids) for ids in sequences], dtype=np.int64))
    return sort_sequences(np.concatenate(sequences), bounds).num_unique_tokens


def _break(finding: _Finding, named: tuple[str, ...], costs: _Costs, tokenizer: PreTrainedTokenizerBase) -> Break:
    name = finding.cause.name
    starts = {row: piece.start for trunk, piece in reversed(finding.places) for row in trunk.rows}
    saved = costs.saved(name, named)
    return Break(
        cause=name,
        num_sequences=round(costs.scale * sum(costs.prompts[row].num_samples for row in starts)),
        num_values=len(finding.values) + (finding.cause is WHITE_SPACE),  # and that of most rows
        at_token=int(np.median([*starts.values()])),
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
    different = {piece.value: (trunk, piece) for trunk, piece in reversed(finding.places)}
    for trunk, piece in islice(reversed(different.values()), NUM_EXAMPLES):
        yield _example(prompts[trunk.rows[0]], piece, finding.cause is WHITE_SPACE, tokenizer)


def _example(prompt: Prompt, piece: Piece, is_blank: bool, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The value without what surrounds it, or just its first blanks, drawn as signs."""
    start, end = piece.start, min(piece.end, piece.start + MAX_BLANKS) if is_blank else piece.end
    text = text_of_run(tokenizer, prompt.ids, start, end)
    match = (_BLANKS if is_blank else _VALUE).search(text)
    first, last = match.span(1) if match else (0, len(text))
    value = text[first:last].translate(_SIGNS) if is_blank else text[first:last]
    return Example(
        where=prompt.where,
        before=text_of_run(tokenizer, prompt.ids, max(0, start - CONTEXT), start) + text[:first],
        value=shortened(value, MAX_CHARACTERS),
        after=text[last:] + text_of_run(tokenizer, prompt.ids, end, min(len(prompt.ids), end + CONTEXT)),
    )
