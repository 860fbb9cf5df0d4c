"""An optimizer batch -> micro-batches under a budget of unique tokens, which is what memory is spent on.

Sharing exists only inside a micro-batch, so what travels together decides the speed. The sequences are sorted, which
puts shared prefixes side by side, and cut where the budget is full. The gradient of the optimizer step does not depend
on the cut, since the loss of a micro-batch is a sum, divided by the labelled tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixtrain.tree.sorting import sort_sequences

__all__ = ["cut_by_padded_tokens", "cut_by_unique_tokens"]

IntArray = npt.NDArray[np.int64]


def cut_by_unique_tokens(
    sequences: Sequence[IntArray], max_tokens: int | None, position_ids: IntArray | None = None
) -> list[list[int]]:
    """Micro-batches of the sequences, by index, in sorted order.

    sequences: token ids of each, (L,), int64.
    max_tokens: most unique tokens in a micro-batch; None for a single one. A sequence that is longer travels alone.
    position_ids: (T,), int64, of all sequences back to back where they do not count from 0.

    Raises ValueError for an empty sequence, which has no place in the order.

    A sequence costs what it adds to its neighbour before it; the first of a micro-batch costs all of itself.
    """
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    if not lengths.all():
        raise ValueError(f"sequence {int(lengths.argmin())} is empty")
    packed = np.concatenate([*sequences, np.zeros(0, dtype=np.int64)])
    by_order = sort_sequences(packed, np.concatenate([[0], np.cumsum(lengths)]), position_ids)
    added = (by_order.lengths - by_order.lcp).tolist()
    return _cut(by_order.order.tolist(), added, by_order.lengths.tolist(), max_tokens)


def cut_by_padded_tokens(sequences: Sequence[IntArray], max_tokens: int | None) -> list[list[int]]:
    """The ordinary baseline: sorted by length, longest first, cut where rows x longest row would exceed the budget."""
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batches: list[list[int]] = []
    for index in order:
        longest = len(sequences[batches[-1][0]]) if batches else 0
        if batches and (max_tokens is None or longest * (len(batches[-1]) + 1) <= max_tokens):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _cut(order: list[int], added: list[int], alone: list[int], max_tokens: int | None) -> list[list[int]]:
    batches: list[list[int]] = []
    total = 0
    for index, extra, full in zip(order, added, alone, strict=True):
        if batches and (max_tokens is None or total + extra <= max_tokens):
            batches[-1].append(index)
            total += extra
        else:
            batches.append([index])
            total = full
    return batches
