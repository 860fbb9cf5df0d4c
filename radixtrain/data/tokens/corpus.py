"""The conversations of several sources, or a selection of them; and which turns are trained.

Rows may be nested: a log of an agent's requests holds each turn in all later rows too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.tokens.store import TokenStore
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative


@dataclass(frozen=True, kw_only=True)
class Part:
    """The conversations of one source.

    weight: how often each occurs in an epoch, on average.
    digest: of its samples.
    """

    name: str
    conversations: Any
    weight: float = 1.0
    digest: str = ""


class Corpus(Sequence[list[TokenRow]]):
    """Conversations by index: `corpus[i]` is a list of samples.

    parts: the sources, one after the other.
    chosen: indices into them, in the order of this corpus; None for all.

    lengths: (num_samples,), int64. tokens of each sample.
    starts: (num_conversations + 1,), int64. the first sample of each conversation, and the end.
    """

    def __init__(self, parts: Sequence[Part], chosen: IntArray | None = None):
        self.parts = tuple(parts)
        self.chosen = chosen
        self.bounds = cumulative(np.array([len(part.conversations) for part in parts]))

    def __len__(self) -> int:
        return int(self.bounds[-1]) if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        place = index if self.chosen is None else int(self.chosen[index])
        part = int(np.searchsorted(self.bounds, place, side="right")) - 1
        return self.parts[part].conversations[place - int(self.bounds[part])]

    def select(self, indices: IntArray) -> Corpus:
        """Select some of the conversations, in this order."""
        return Corpus(self.parts, indices if self.chosen is None else self.chosen[indices])

    @property
    def weights(self) -> np.ndarray | None:
        """Return how often each conversation occurs in an epoch, (num_conversations,), float64; None if once."""
        if all(part.weight == 1 for part in self.parts):
            return None
        weights = np.repeat([part.weight for part in self.parts], np.diff(self.bounds))
        return weights if self.chosen is None else weights[self.chosen]

    @cached_property
    def starts(self) -> IntArray:
        return cumulative(self._sizes)

    @cached_property
    def lengths(self) -> IntArray:
        lengths = np.concatenate([part.conversations.lengths for part in self.parts])
        if self.chosen is None:
            return lengths
        return lengths[concatenate_ranges(cumulative(self._all_sizes)[self.chosen], self._sizes)]

    @property
    def digest(self) -> str:
        """Return a digest that distinguishes these conversations, in this order, from others."""
        digest = xxhash.xxh3_128(" ".join(f"{part.digest} {part.weight!r}" for part in self.parts).encode())
        if self.chosen is not None:
            digest.update(self.chosen.astype(np.int64).tobytes())
        return digest.hexdigest()

    @cached_property
    def _all_sizes(self) -> IntArray:
        return np.concatenate([np.diff(part.conversations.starts) for part in self.parts])

    @property
    def _sizes(self) -> IntArray:
        """Return the number of samples of each conversation."""
        return self._all_sizes if self.chosen is None else self._all_sizes[self.chosen]


def last_turns(store: TokenStore) -> np.ndarray:
    """Mark the last sample of each conversation, (num_samples,), bool."""
    is_last = np.zeros(len(store.lengths), dtype=bool)
    is_last[store.starts[1:] - 1] = True
    return is_last


def distinct_turns(store: TokenStore) -> np.ndarray:
    """Mark every turn once, (num_samples,), bool, in the conversation that has most turns.

    Samples of turns are one turn if their tokens, labels and weights are the same. Rows that are equal as a whole stay,
    as often as they occur; so do all whole chats.
    """
    if len(store) == len(store.lengths):
        return np.ones(len(store), dtype=bool)
    sizes = np.diff(store.starts)
    trained_in: dict[bytes, tuple[bytes, ...]] = {}
    is_chosen = np.zeros(len(store.lengths), dtype=bool)
    for place in np.argsort(-sizes, kind="stable"):
        row = tuple(_key(sample) for sample in store[place])
        first = store.starts[place]
        is_chosen[first : first + len(row)] = [trained_in.setdefault(key, row) == row for key in row]
    return is_chosen


def _key(sample: TokenRow) -> bytes:
    digest = xxhash.xxh3_128(sample.input_ids.tobytes())
    digest.update(sample.labels.tobytes())
    if sample.loss_weights is not None:
        digest.update(sample.loss_weights.tobytes())
    return digest.digest()
