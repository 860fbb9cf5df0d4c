"""What prompts cost once some causes are fixed: values moved to the end of the common text, or made alike.

The prompts are rewritten as tokens. A text that is moved is tokenised a little otherwise at its borders, which is not
counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixtrain.report.divergence.causes import WHITE_SPACE
from radixtrain.report.divergence.prompts import Prompt
from radixtrain.report.divergence.slots import Layout, Piece
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import sort_sequences

__all__ = ["num_unique_tokens", "rearranged"]


def rearranged(prompts: list[Prompt], layouts: list[Layout], fixed: Iterable[str]) -> list[IntArray]:
    """The tokens of all prompts once the causes of these names are fixed, each (L',), int64."""
    names = set(fixed)
    changed = [prompt.ids for prompt in prompts]
    for layout in layouts:
        for member, pieces in layout.pieces.items():
            head = _head(member.trunk.prompt.ids, pieces, layout, names)
            end = pieces[-1].end if pieces else 0
            for row in member.trunk.rows:
                changed[row] = np.concatenate([head, prompts[row].ids[end:]])
    return changed


def _head(ids: IntArray, pieces: list[Piece], layout: Layout, names: set[str]) -> IntArray:
    """The common text of a prompt, and the values that were moved to its end."""
    kept, moved = [ids[:0]], []
    for piece in pieces:
        own = ids[piece.start : piece.end]
        if piece.slot is None:
            kept.append(layout.usual[piece.key] if WHITE_SPACE.name in names else own)
        elif piece.slot.cause.name not in names:
            kept.append(own)
        elif piece.slot.cause.moves:
            moved.append(own)
        else:
            kept.append(piece.slot.usual)
    return np.concatenate([*kept, *moved])


def num_unique_tokens(sequences: list[IntArray], batch_size: int) -> int:
    """Tokens that the steps of `batch_size` sequences compute, in the order given, if each is one micro-batch."""
    return sum(_num_unique(sequences[start : start + batch_size]) for start in range(0, len(sequences), batch_size))


def _num_unique(sequences: list[IntArray]) -> int:
    bounds = cumulative(np.array([len(ids) for ids in sequences], dtype=np.int64))
    return sort_sequences(np.concatenate(sequences), bounds).num_unique_tokens
