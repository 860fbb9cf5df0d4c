"""Conversations of several sources back to back, or a selection of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from radixtrain.collators.token_row import TokenRow
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
        """Some of the conversations, in this order."""
        return Corpus(self.parts, indices if self.chosen is None else self.chosen[indices])

    @property
    def weights(self) -> np.ndarray | None:
        """(num_conversations,), float64. how often each occurs in an epoch; None if each occurs once."""
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
        """Tells these conversations, in this order, from others."""
        digest = xxhash.xxh3_128(" ".join(f"{part.digest} {part.weight!r}" for part in self.parts).encode())
        if self.chosen is not None:
            digest.update(self.chosen.astype(np.int64).tobytes())
        return digest.hexdigest()

    @cached_property
    def _all_sizes(self) -> IntArray:
        return np.concatenate([np.diff(part.conversations.starts) for part in self.parts])

    @property
    def _sizes(self) -> IntArray:
        """Samples of each conversation."""
        return self._all_sizes if self.chosen is None else self._all_sizes[self.chosen]
