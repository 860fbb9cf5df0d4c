"""How often each conversation comes in an epoch, if sources have weights."""

from __future__ import annotations

import numpy as np

from radixtrain.tree.arrays import IntArray

__all__ = ["draw_epoch", "epoch_size"]


def draw_epoch(weights: np.ndarray, generator: np.random.Generator) -> IntArray:
    """Indices of the conversations of an epoch, in rising order; each as often as its weight says on average.

    weights: (num_conversations,), float64, not negative. 2.0: twice in every epoch; 0.25: a quarter of the
        conversations of this weight, drawn anew for every epoch.
    """
    times = np.floor(weights).astype(np.int64)
    for part, size in _parts(weights):
        drawn = generator.choice(np.flatnonzero(weights % 1 == part), size, replace=False)
        times[drawn] += 1
    return np.repeat(np.arange(len(weights)), times)


def epoch_size(weights: np.ndarray) -> int:
    """Conversations in an epoch, the same for every epoch."""
    return int(np.floor(weights).sum()) + sum(size for _, size in _parts(weights))


def _parts(weights: np.ndarray) -> list[tuple[float, int]]:
    """The fractions that weights have, and how many of the conversations with each come once more."""
    parts, counts = np.unique(weights % 1, return_counts=True)
    return [(part, round(part * count)) for part, count in zip(parts.tolist(), counts.tolist(), strict=True) if part]
