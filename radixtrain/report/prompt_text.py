"""The prompts of a data set, and which of their text several of them compute each for itself.

A symbol is a token without the blanks around it; a token of blanks only has none. Symbols are compared, so that a text
with other line ends is the same text; tokens are counted.
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
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import sort_sequences

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
    symbols: (M,), int64. texts without blanks, as numbers.
    places: (M + 1,), int64. the token of each symbol, and L.
    starts: (M + 1,), bool. whether a word starts at this symbol, or the text ends.
    where: file and line of the conversation.
    num_samples: of the conversation, one after the other on the same prompt.
    """

    ids: IntArray
    symbols: IntArray
    places: IntArray
    starts: Flags
    where: str
    num_samples: int


def draw_prompts(
    conversations: Sequence[Sequence[Sample]], tokenizer: PreTrainedTokenizerBase, max_conversations: int
) -> list[Prompt]:
    """The prompts of conversations drawn at random, always the same ones, in the order in which they were drawn.

    Each is that of the conversation's first sample, which the others extend. Drawing ends at `max_conversations`, or
    once there are two million tokens. A conversation without a sample is passed over.
    """
    order = np.random.default_rng(0).permutation(len(conversations))
    drawn: list[tuple[IntArray, str, int]] = []
    num_tokens = 0
    for index in order[:max_conversations].tolist():
        samples = conversations[index]
        if len(samples) and num_tokens < MAX_TOKENS:
            drawn.append((_unlabelled(samples[0]), samples[0].where, len(samples)))
            num_tokens += len(drawn[-1][0])
    return _as_symbols(drawn, tokenizer)


def _unlabelled(sample: Sample) -> IntArray:
    """The tokens before the first one that bears loss."""
    labelled = sample.labels != IGNORE_INDEX
    return np.array(sample.input_ids[: int(labelled.argmax()) if labelled.any() else None], dtype=np.int64)


def _as_symbols(drawn: list[tuple[IntArray, str, int]], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    vocabulary = np.unique(_packed([ids for ids, _, _ in drawn]))
    texts = token_texts(tokenizer, vocabulary.tolist())
    numbers: dict[str, int] = {}
    names = (
        f"{token}{text}" if BROKEN in text else text.strip() for token, text in zip(vocabulary, texts, strict=True)
    )
    symbols = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
    is_blank = np.array([not text.strip() for text in texts], dtype=bool)
    is_special = np.isin(vocabulary, tokenizer.all_special_ids)
    blank_before = np.array([text[:1].isspace() for text in texts], dtype=bool) | is_special
    blank_after = np.array([text[-1:].isspace() for text in texts], dtype=bool) | is_special
    prompts = []
    for ids, where, num_samples in drawn:
        entries = vocabulary.searchsorted(ids)
        places = (~is_blank[entries]).nonzero()[0]
        starts = blank_before[entries] | np.append(True, blank_after[entries])[:-1]
        bounds, borders = np.append(places, len(ids)), np.append(starts[places], True)
        prompts.append(Prompt(ids, symbols[entries[places]], bounds, borders, where, num_samples))
    return prompts


def shingles(symbols: IntArray) -> Hashes:
    """(M - 7,) or (0,). a hash of each 8 symbols in a row."""
    if len(symbols) < SHINGLE:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(_scattered(symbols), SHINGLE)
    return _scattered((windows * _scattered(np.arange(SHINGLE))).sum(axis=1))


def _scattered(values: IntArray | Hashes) -> Hashes:
    """A mixing step of splitmix64: sums of what comes out collide no more than random numbers do."""
    mixed: Hashes = (values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def repeated_symbols(prompts: list[Prompt], hashes: list[Hashes]) -> list[Flags]:
    """For each prompt (M,): whether a symbol is part of 20 in a row that are computed at several places of the tree.

    hashes: the `shingles` of each prompt. One is computed with its last token, unless the prompt shares that.
    """
    bounds = cumulative(np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64))
    by_order = sort_sequences(_packed([prompt.ids for prompt in prompts]), bounds)
    computed = [np.zeros(0, dtype=np.uint64)]
    for index, num_shared in zip(by_order.order.tolist(), by_order.lcp.tolist(), strict=True):
        ends = prompts[index].places[SHINGLE - 1 :][: len(hashes[index])]
        computed.append(np.unique(hashes[index][ends >= num_shared]))
    values, counts = np.unique(np.concatenate(computed), return_counts=True)
    recurs = np.isin(np.concatenate([*hashes, computed[0]]), values[counts > 1])
    of_prompts = np.split(recurs, np.cumsum([len(own) for own in hashes]))
    return [_long_runs(own, len(prompt.symbols)) for prompt, own in zip(prompts, of_prompts, strict=False)]


def _long_runs(shingle_recurs: Flags, num_symbols: int) -> Flags:
    """(M,). The symbols of these shingles, if they are 20 in a row or more."""
    recurs = np.convolve(shingle_recurs, np.ones(SHINGLE)) > 0 if len(shingle_recurs) else np.zeros(num_symbols, bool)
    borders = np.diff(np.concatenate([[0], recurs.astype(np.int8), [0]])).nonzero()[0]
    for start, end in borders.reshape(-1, 2).tolist():
        recurs[start:end] = end - start >= MIN_RUN
    return recurs


def _packed(sequences: list[IntArray]) -> IntArray:
    return np.concatenate([*sequences, np.zeros(0, dtype=np.int64)])
