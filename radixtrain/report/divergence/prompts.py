"""The prompts of a data set, read word by word: blanks do not count, so that a text in two layouts is one text.

A symbol is a token without the blanks around it; a token of blanks only has none. Symbols are what is compared, tokens
are what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixtrain.collators.features import IGNORE_INDEX
from radixtrain.data.sample import Sample
from radixtrain.data.tokens.decode import BROKEN, token_texts
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "draw_prompts"]

MAX_TOKENS = 2_000_000  # of all prompts that are drawn


@dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a conversation before its first label.

    ids: (L,), int64. token ids.
    symbols: (M,), int64. texts without blanks, as numbers.
    places: (M + 1,), int64. the token of each symbol, and L.
    starts: (M + 1,), bool. whether a word starts at this symbol, or the text ends.
    where: file and line of the conversation.
    num_samples: of the conversation, one after the other on the same prompt.
    """

    ids: IntArray
    symbols: IntArray
    places: IntArray
    starts: npt.NDArray[np.bool_]
    where: str
    num_samples: int

    def tokens(self, start: int, end: int) -> IntArray:
        """Of the symbols [start, end), with the blanks that follow each of them."""
        return self.ids[self.places[start] if start else 0 : self.places[end]]


def draw_prompts(
    conversations: Sequence[Sequence[Sample]], tokenizer: PreTrainedTokenizerBase, max_conversations: int
) -> list[Prompt]:
    """The prompts of conversations drawn at random, always the same ones, in the order in which they were drawn.

    Each is that of the conversation's first sample: the others go on from there. Drawing ends at `max_conversations`,
    or once there are two million tokens. A conversation without a sample is passed over.
    """
    order = np.random.default_rng(0).permutation(len(conversations))
    drawn: list[tuple[IntArray, Sample, int]] = []
    num_tokens = 0
    for index in order[:max_conversations].tolist():
        samples = conversations[index]
        if len(samples) and num_tokens < MAX_TOKENS:
            drawn.append((_unlabelled(samples[0]), samples[0], len(samples)))
            num_tokens += len(drawn[-1][0])
    vocabulary = _Vocabulary(tokenizer, [ids for ids, _, _ in drawn])
    return [vocabulary.prompt(ids, sample.where, num_samples) for ids, sample, num_samples in drawn]


def _unlabelled(sample: Sample) -> IntArray:
    """The tokens before the first one that bears loss."""
    labelled = sample.labels != IGNORE_INDEX
    return np.array(sample.input_ids[: int(labelled.argmax()) if labelled.any() else None], dtype=np.int64)


class _Vocabulary:
    """What the tokens of some sequences are as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequences: list[IntArray]):
        self.ids = np.unique(np.concatenate([*sequences, np.zeros(0, dtype=np.int64)]))
        texts = token_texts(tokenizer, self.ids.tolist())
        special = set(tokenizer.all_special_ids)
        numbers: dict[str, int] = {}
        names = (
            f"{token}{text}" if BROKEN in text else text.strip() for token, text in zip(self.ids, texts, strict=True)
        )
        self.symbols = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
        self.is_blank = np.array([not text.strip() for text in texts], dtype=bool)
        is_special = np.array([token in special for token in self.ids.tolist()], dtype=bool)
        self.blank_before = np.array([text[:1].isspace() for text in texts], dtype=bool) | is_special
        self.blank_after = np.array([text[-1:].isspace() for text in texts], dtype=bool) | is_special

    def prompt(self, ids: IntArray, where: str, num_samples: int) -> Prompt:
        entries = self.ids.searchsorted(ids)
        places = (~self.is_blank[entries]).nonzero()[0]
        starts = self.blank_before[entries]
        starts[1:] |= self.blank_after[entries[:-1]]
        starts[:1] = True
        return Prompt(
            ids=ids,
            symbols=self.symbols[entries[places]],
            places=np.append(places, len(ids)),
            starts=np.append(starts[places], True),
            where=where,
            num_samples=num_samples,
        )
