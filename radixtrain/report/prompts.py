"""The prompts of a data set, and which text several of them compute separately.

A symbol is a token without the blanks around it; a token of blanks only has none. Symbols are compared, so that a text
with other line ends is the same text; tokens are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.tokens.decode import BROKEN, token_texts
from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.sorting import SortedSequences, sort_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]

MAX_TOKENS = 2_000_000  # of all prompts that are drawn
SHINGLE = 8  # symbols that are compared at once: fewer recur by chance
MIN_RUN = 20  # symbols of a text that counts as recurring: a template's words around a turn are fewer


@dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a conversation before its first label.

    ids: (L,), int64. token ids.
    symbols: (M,), int64. texts without blanks, as numbers. places: (M + 1,), int64. the token of each symbol, and L.
    where: file and line of the conversation. num_samples: of it, one after the other on the same prompt.
    """

    ids: IntArray
    symbols: IntArray
    places: IntArray
    where: str
    num_samples: int


def draw_prompts(
    conversations: Sequence[Sequence[TokenRow]], tokenizer: PreTrainedTokenizerBase, max_conversations: int
) -> list[Prompt]:
    """Draw prompts of conversations at random with a fixed seed, in the order of the draw.

    Each is that of the conversation's first sample, which the others extend. Drawing ends at `max_conversations`, or
    once there are two million tokens. A conversation without a sample is skipped.
    """
    drawn: list[tuple[IntArray, Sequence[TokenRow]]] = []
    num_tokens = 0
    for index in np.random.default_rng(0).permutation(len(conversations))[:max_conversations].tolist():
        samples = conversations[index]
        if len(samples) and num_tokens < MAX_TOKENS:
            labelled = samples[0].labels != IGNORE_INDEX
            ids = samples[0].input_ids[: int(labelled.argmax()) if labelled.any() else None].astype(np.int64)
            drawn.append((ids, samples))
            num_tokens += len(ids)
    vocabulary = np.unique(back_to_back([ids for ids, _ in drawn])[0])
    texts = zip(vocabulary, token_texts(tokenizer, vocabulary.tolist()), strict=True)
    names = [f"{token}{text}" if BROKEN in text else text.strip() for token, text in texts]
    numbers = {name: number for number, name in enumerate(["", *names])}
    symbols = np.array([numbers[name] for name in names], dtype=np.int64)
    prompts = []
    for ids, samples in drawn:
        own = symbols[vocabulary.searchsorted(ids)]
        places = (own != numbers[""]).nonzero()[0]
        prompts.append(Prompt(ids, own[places], np.append(places, len(ids)), samples[0].where, len(samples)))
    return prompts


def shingles(symbols: IntArray) -> Hashes:
    """Hash each 8 consecutive symbols, (M - 7,) or (0,)."""
    if len(symbols) < SHINGLE:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(_scattered(symbols), SHINGLE)
    return _scattered((windows * _scattered(np.arange(SHINGLE))).sum(axis=1))


def _scattered(values: IntArray | Hashes) -> Hashes:
    """Mix as splitmix64 does: sums of the results collide no more than random numbers do."""
    mixed: Hashes = (values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def runs_of(chosen: Flags) -> list[tuple[int, int]]:
    """Return (start, end) of each run that is chosen without a gap."""
    borders = np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]])).nonzero()[0]
    return [(start, end) for start, end in borders.reshape(-1, 2).tolist()]


def repeated_symbols(prompts: list[Prompt]) -> list[Flags]:
    """Mark in each prompt the runs of 20 or more symbols that are computed at several places of the tree.

    A shingle is computed with its last token, unless the prompt shares that.
    """
    hashes = [shingles(prompt.symbols) for prompt in prompts]
    tree = sorted_prompts([prompt.ids for prompt in prompts])
    computed = [np.zeros(0, dtype=np.uint64)]
    for index, num_shared in zip(tree.order.tolist(), tree.lcp.tolist(), strict=True):
        ends = prompts[index].places[SHINGLE - 1 :][: len(hashes[index])]
        computed.append(np.unique(hashes[index][ends >= num_shared]))
    values, counts = np.unique(np.concatenate(computed), return_counts=True)
    repeated = []
    for own in hashes:
        symbols = np.convolve(np.isin(own, values[counts > 1]), np.ones(SHINGLE)) > 0 if len(own) else np.zeros(0, bool)
        for start, end in runs_of(symbols):
            symbols[start:end] = end - start >= MIN_RUN
        repeated.append(symbols)
    return repeated


def sorted_prompts(sequences: list[IntArray]) -> SortedSequences:
    """Return the order of the prefix tree, and what neighbours in it share."""
    return sort_sequences(*back_to_back(sequences))
