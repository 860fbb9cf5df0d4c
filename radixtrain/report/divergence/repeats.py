"""Text that several prompts have and that each computes for itself, since they part before it.

That is what an early difference costs. Text that is shared already, or that one prompt only has, is not counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixtrain.report.divergence.prompts import Prompt
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import sort_sequences

__all__ = ["SHINGLE", "repeated_symbols", "shingles"]

Hashes = npt.NDArray[np.uint64]

SHINGLE = 8  # symbols that are compared at once: fewer recur by chance
MIN_RUN = 20  # symbols of a text that counts as recurring: a template's words around a turn are fewer


def shingles(symbols: IntArray) -> Hashes:
    """(M - 7,) or (0,). a hash of each 8 symbols in a row."""
    count = max(0, len(symbols) - SHINGLE + 1)
    scattered = _scatter(symbols.astype(np.uint64))
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + scattered[offset : offset + count]
    return _scatter(hashes)


def repeated_symbols(prompts: list[Prompt], hashes: list[Hashes]) -> list[npt.NDArray[np.bool_]]:
    """For each prompt (M,): whether a symbol is part of 20 in a row that are computed at several places of the tree.

    hashes: the `shingles` of each prompt.
    """
    computed = [
        np.unique(hashes[index][_ends(prompts[index], len(hashes[index])) >= num_shared])
        for index, num_shared in _shared_tokens(prompts)
    ]
    values, counts = np.unique(np.concatenate([*computed, np.zeros(0, dtype=np.uint64)]), return_counts=True)
    several = values[counts > 1]
    return [
        _long_runs(_covered_by(found, several, len(prompt.symbols)))
        for prompt, found in zip(prompts, hashes, strict=True)
    ]


def _covered_by(hashes: Hashes, known: Hashes, num_symbols: int) -> npt.NDArray[np.bool_]:
    """(M,). whether a symbol is in one of the known shingles. known: sorted, distinct."""
    steps = np.zeros(num_symbols + 1, dtype=np.int64)
    found = _is_in(hashes, known).nonzero()[0]
    np.add.at(steps, found, 1)
    np.add.at(steps, found + SHINGLE, -1)
    return np.add.accumulate(steps)[:-1] > 0


def _is_in(hashes: Hashes, known: Hashes) -> npt.NDArray[np.bool_]:
    if not len(known):
        return np.zeros(len(hashes), dtype=bool)
    return known[np.minimum(known.searchsorted(hashes), len(known) - 1)] == hashes


def _shared_tokens(prompts: list[Prompt]) -> zip[tuple[int, int]]:
    """The index of each prompt, and how many tokens it shares with the one before it in sorted order."""
    bounds = cumulative(np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64))
    packed = np.concatenate([*(prompt.ids for prompt in prompts), np.zeros(0, dtype=np.int64)])
    by_order = sort_sequences(packed, bounds)
    return zip(by_order.order.tolist(), by_order.lcp.tolist(), strict=True)


def _ends(prompt: Prompt, num_shingles: int) -> IntArray:
    """The last token of each shingle: it is computed anew if that token is."""
    return prompt.places[SHINGLE - 1 : SHINGLE - 1 + num_shingles]


def _long_runs(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The mask without runs of fewer than 20."""
    borders = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])).nonzero()[0]
    kept = np.zeros(len(mask), dtype=bool)
    for start, end in borders.reshape(-1, 2).tolist():
        kept[start:end] = end - start >= MIN_RUN
    return kept


def _scatter(values: Hashes) -> Hashes:
    """A mixing step of splitmix64: sums of what comes out collide no more than random numbers do."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(27))
