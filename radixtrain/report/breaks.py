"""What breaks sharing: at which token near-identical prompts diverge, why, and what fixing only that saves.

prompts --versions.py--> common text and differences, each with its cause --fixed--> the unique tokens, counted again
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.tokens.decode import shortened, text_of_run
from radixtrain.report.causes import WHITE_SPACE, whole_words
from radixtrain.report.contents import Break, Example
from radixtrain.report.prompts import Prompt, draw_prompts, sorted_prompts
from radixtrain.report.versions import Piece, Trunk, find_layouts, num_equal
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONVERSATIONS = 2000
MIN_SAVED = 0.01  # share of the computed prompt tokens: less deserves no line
NUM_EXAMPLES = 3
CONTEXT = 24  # tokens to show before and after the value of an example
MAX_BLANKS = 4  # tokens to show of an example of white space
MAX_CHARACTERS = 240  # to show of a value in an example

_VALUE = re.compile(r"(\S.*?)[.,;:]*\s*$", re.DOTALL)  # without the blanks and the punctuation around it
_BLANKS = re.compile(r"(\s+)")
_SIGNS = {ord(" "): "·", ord("\t"): "→", ord("\r"): "␍", ord("\n"): "↵"}


def find_breaks(
    conversations: Sequence[Sequence[TokenRow]], tokenizer: PreTrainedTokenizerBase, batch_size: int = 32
) -> tuple[Break, ...]:
    """Find why near-identical prompts diverge early: the causes, first the one whose fix alone saves most.

    conversations: the samples of each. A prompt is what precedes the first label of a conversation's first sample; text
        without a prompt has no breaks. At most 2,000 are read, drawn with a fixed seed, and two million prompt tokens.
    batch_size: conversations of an optimizer step, at least 1.

    The fix is applied to the drawn prompts, and their unique tokens are counted again: a date, an id, a name, a number,
    a text of the row's own or one of several prompts moves to the end of the text that the prompts have in common; an
    order, white space or a stray version becomes what most rows have. They are counted in steps of `batch_size` drawn
    conversations, since sharing ends with a step, and multiplied by the conversations of the epoch over those drawn.
    `tokens_saved` is by this fix only, `tokens_with_others` what it adds to the other reported fixes. A cause for which
    both are below 1 % of the computed prompt tokens is not reported.

    `num_sequences` is scaled in the same way. It counts samples that differ from the value of more than half of them,
    or all that have a value if none is that frequent. `num_values` counts values in the drawn conversations.
    """
    prompts = draw_prompts(conversations, tokenizer, MAX_CONVERSATIONS)
    scale = len(conversations) / max(1, len(prompts))
    read = [item for layout in find_layouts(prompts, tokenizer) for item in layout.items()]

    @cache
    def computed(fixed: frozenset[str]) -> int:
        sequences = _fixed_prompts(prompts, read, fixed)
        steps = (sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size))
        return round(scale * sum(sorted_prompts(step).num_unique_tokens for step in steps))

    def saved(name: str, others: frozenset[str] = frozenset()) -> int:
        return max(0, computed(others) - computed(others | {name}))

    causes = {piece.cause.name: piece.cause for _, pieces in read for piece in pieces if piece.cause}
    named = frozenset(causes)
    while named:
        most, least = min((max(saved(name), saved(name, named - {name})), name) for name in named)
        if most >= max(1, MIN_SAVED * computed(frozenset())):
            break
        named -= {least}
    breaks = []
    for name in named:
        places = [(trunk, piece) for trunk, pieces in read for piece in pieces if piece.cause == causes[name]]
        changed = [place for place in places if place[1].has_other]
        values = {tuple(piece.value for piece in pieces if piece.cause == causes[name]) for _, pieces in read}
        starts = {row: _parting(trunk.prompt, piece) for trunk, piece in reversed(changed) for row in trunk.rows}
        breaks.append(
            Break(
                cause=name,
                num_sequences=round(scale * sum(prompts[row].num_samples for row in starts)),
                num_values=len(values - {()}),
                at_token=int(np.median([*starts.values()])),
                tokens_saved=saved(name),
                tokens_with_others=saved(name, named - {name}),
                advice=causes[name].advice,
                examples=_examples(changed, tokenizer),
            )
        )
    return tuple(sorted(breaks, key=lambda each: (-each.tokens_saved, -each.tokens_with_others)))


def _fixed_prompts(
    prompts: list[Prompt], read: list[tuple[Trunk, list[Piece]]], names: frozenset[str]
) -> list[IntArray]:
    """Return the tokens of all prompts with these causes fixed. Moved text is not tokenised again at its borders."""
    sequences = [prompt.ids for prompt in prompts]
    for trunk, pieces in read:
        head, moved = [trunk.prompt.ids[:0]], [trunk.prompt.ids[:0]]
        for piece in pieces:
            own = trunk.prompt.ids[piece.start : piece.end]
            if piece.cause is None or piece.cause.name not in names:
                head.append(own)
            elif piece.cause.moves:
                moved.append(own)
            else:
                head.append(piece.usual)
        for row in trunk.rows:
            sequences[row] = np.concatenate([*head, *moved, prompts[row].ids[pieces[-1].end :]])
    return sequences


def _parting(prompt: Prompt, piece: Piece) -> int:
    """Return the token at which a row diverges from the others: in white space the first one that differs."""
    own = prompt.ids[piece.start : piece.end] if piece.cause is WHITE_SPACE else piece.usual[:0]
    return piece.start + num_equal(own, piece.usual)


def _examples(places: list[tuple[Trunk, Piece]], tokenizer: PreTrainedTokenizerBase) -> tuple[Example, ...]:
    """Return the first prompts with different values."""
    different = {piece.value: (trunk.prompt, piece) for trunk, piece in reversed(places)}
    return tuple(_example(*place, tokenizer) for place in [*reversed(different.values())][:NUM_EXAMPLES])


def _example(prompt: Prompt, piece: Piece, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Show the value without what surrounds it, or only its first blanks, drawn as signs."""
    is_blank, start = piece.cause is WHITE_SPACE, _parting(prompt, piece)
    end = min(piece.end, start + MAX_BLANKS) if is_blank else piece.end
    text, before = (
        text_of_run(tokenizer, prompt.ids, a, b) for a, b in ((start, end), (max(0, start - CONTEXT), start))
    )
    text, before = (text, before) if is_blank else whole_words(text, before)
    match = (_BLANKS if is_blank else _VALUE).search(text)
    first, last = match.span(1) if match else (0, len(text))
    value = text[first:last].translate(_SIGNS) if is_blank else text[first:last]
    return Example(
        where=prompt.where,
        before=before + text[:first],
        value=shortened(value, MAX_CHARACTERS),
        after=text[last:] + text_of_run(tokenizer, prompt.ids, end, min(len(prompt.ids), end + CONTEXT)),
    )
