"""What breaks sharing: where near-identical prompts diverge, why, and what fixing only that saves.

prompts --versions.py--> common text and differences, each with its cause --fixed--> tokenised and counted again
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.explain.causes import WHITE_SPACE
from radixtrain.explain.versions import Place, Trunk, find_versions, num_equal
from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.sorting import sort_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONVERSATIONS, MAX_TOKENS = 2000, 1_000_000  # that are drawn
MIN_SAVED = 0.01  # share of the computed prompt tokens: less deserves no line
NUM_EXAMPLES = 3
CONTEXT = 80  # characters to show before and after the value of an example

SIGNS = {ord(" "): "·", ord("\t"): "→", ord("\r"): "␍", ord("\n"): "↵"}


class Example(NamedTuple):
    """One row at the place where it diverges from the others.

    where: `file:line`. before: the text just before. value: what differs. after: the text that follows it.
    """

    where: str
    before: str
    value: str
    after: str


class Break(NamedTuple):
    """Why near-identical prompts diverge early.

    cause: a date, a UUID, a name, the order of tools, white space, several prompts, the order of the examples ...
    num_sequences: sequences affected.
    tokens_saved: computed tokens of an epoch that moving it to the end of the prompt saves; for an order, white space
        or a stray version: that giving all rows the same saves. tokens_with_others: once other breaks are fixed.
    advice: a sentence on what to do about it.
    """

    cause: str
    num_sequences: int
    tokens_saved: int
    tokens_with_others: int
    advice: str
    examples: tuple[Example, ...]


def find_breaks(
    conversations: Sequence[Sequence[TokenRow]], tokenizer: PreTrainedTokenizerBase, batch_size: int = 32
) -> tuple[Break, ...]:
    """Find why near-identical prompts diverge early: the causes, first the one whose fix alone saves most.

    conversations: the samples of each. A prompt is what precedes the first label of a conversation's first sample; text
        without a prompt has no breaks. At most 2,000 are read, drawn with a fixed seed, and a million prompt tokens.
    batch_size: conversations of an optimizer step, at least 1.

    The fix is applied to the text of the drawn prompts, and their unique tokens are counted again: a date, an id, a
    name, a number, a text of the row's own or one of several prompts moves to the end of the text that the prompts have
    in common; an order, white space or a stray version becomes what most rows have. They are counted in steps of
    `batch_size` drawn conversations, since sharing ends with a step, and multiplied by the conversations of the epoch
    over those drawn. `tokens_saved` is by this fix only, `tokens_with_others` what it adds to the other reported fixes.
    A cause for which both are below 1 % of the computed prompt tokens is not reported.

    `num_sequences` is scaled in the same way. It counts samples that differ from the value of more than half of them,
    or all that have a value if none is that frequent.
    """
    drawn, texts = _drawn(conversations, tokenizer)
    scale = len(conversations) / max(1, len(drawn))
    versions = find_versions(texts)
    causes = {place.cause.name: place.cause for places in versions for place in places if place.cause}
    ids_of: dict[str, IntArray] = {}

    @cache
    def computed(names: frozenset[str]) -> int:
        fixed = _fixed_prompts(texts, versions, names)
        if new := [*{*fixed} - {*ids_of}]:
            ids = tokenizer(new, add_special_tokens=False, verbose=False)["input_ids"]  # or it warns of long prompts
            ids_of.update(zip(new, map(np.array, ids), strict=True))
        steps = ([ids_of[text] for text in fixed[at : at + batch_size]] for at in range(0, len(fixed), batch_size))
        return round(scale * sum(sort_sequences(*back_to_back(step)).num_unique_tokens for step in steps))

    def saved(name: str, others: frozenset[str] = frozenset()) -> int:
        return max(0, computed(others) - computed(others | {name}))

    named = frozenset(causes)
    while named:
        most, least = min((max(saved(name), saved(name, named - {name})), name) for name in named)
        if most >= max(1, MIN_SAVED * computed(frozenset())):
            break
        named -= {least}
    breaks = []
    for name in named:
        differing = [(place, trunks) for places in versions for place in places for trunks in place.differing(name)]
        rows = {row for _, trunks in differing for trunk in trunks for row in trunk.rows}
        examples = ((place, trunks[0], trunks[0].rows[0]) for place, trunks in differing[:NUM_EXAMPLES])
        breaks.append(
            Break(
                cause=name,
                num_sequences=round(scale * sum(len(drawn[row]) for row in rows)),
                tokens_saved=saved(name),
                tokens_with_others=saved(name, named - {name}),
                advice=causes[name].advice,
                examples=tuple(
                    _example(place, trunk, texts[row], drawn[row][0].where) for place, trunk, row in examples
                ),
            )
        )
    return tuple(sorted(breaks, key=lambda each: (-each.tokens_saved, -each.tokens_with_others)))


def _drawn(
    conversations: Sequence[Sequence[TokenRow]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Sequence[TokenRow]], list[str]]:
    """Draw conversations at random with a fixed seed, and the text of their prompts. Skips those without a sample."""
    drawn, prompts, num_tokens = [], [], 0
    for index in np.random.default_rng(0).permutation(len(conversations))[:MAX_CONVERSATIONS].tolist():
        samples = conversations[index]
        if len(samples) and num_tokens < MAX_TOKENS:
            labelled = samples[0].labels != IGNORE_INDEX
            prompts.append(samples[0].input_ids[: int(labelled.argmax()) if labelled.any() else None].tolist())
            drawn.append(samples)
            num_tokens += len(prompts[-1])
    return drawn, tokenizer.batch_decode(prompts, clean_up_tokenization_spaces=False) if prompts else []


def _fixed_prompts(texts: list[str], versions: list[list[Place]], names: frozenset[str]) -> list[str]:
    """Return all prompts with these causes fixed."""
    fixed = list(texts)
    for places in versions:
        for trunk, (_, end) in places[-1].spans.items():
            head, moved = "", ""
            for place in places:
                if place.cause is None or place.cause.name not in names:
                    head += place.text(trunk)
                elif place.cause.moves:
                    moved += f" {place.text(trunk)}"
                else:
                    head += place.usual
            for row in trunk.rows:
                fixed[row] = head + moved + texts[row][end:]
    return fixed


def _example(place: Place, trunk: Trunk, text: str, where: str) -> Example:
    """Show a value without what surrounds it, or only the first blanks that differ, as signs. text: of the prompt."""
    own, start = place.text(trunk), place.spans[trunk][0]
    if place.cause == WHITE_SPACE:
        start += num_equal(own, place.usual)
        end = len(text) - len(text[start:].lstrip())
        value = text[start:end].translate(SIGNS)
    else:
        start += len(own) - len(own.lstrip())
        end = start + len(own.strip().rstrip(".,;:"))
        value = text[start:end]
    return Example(where, text[max(0, start - CONTEXT) : start], value, text[end : end + CONTEXT])
