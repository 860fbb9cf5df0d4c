"""Tokens of rows with images: which are placeholders, what replaces each of them, and which tokens are the same.

    input_ids  7 <img> <img> 8    images  A    features  A0 A1    tokens compared  7 A0 A1 8
               7 <img> <img> 9            A                                        7 A0 A1 9

A placeholder is compared by the row of the features that replaces it, so tokens after different images are never
shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, lengths_of
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.plan import PrefixPlan

BoolArray = npt.NDArray[np.bool_]
TYPES, TOKEN_TYPES = "mm_token_type_ids", "token_type_ids"  # 1 at placeholders of images


@dataclass(eq=False)
class ImageTokens:
    """T tokens of some sequences, back to back, of which P are placeholders of images.

    ids: (T,), int64. is_image: (T,), bool.
    rows: (P,), int64. the row of the features at each placeholder.
    positions: (T,), or (A, T) on several axes, int64; None if they count from 0 in each sequence.
    blocks: (T,), int64. a number for each block of each sequence, whose tokens attend to each other, -1 outside; None
        if all tokens attend only backwards.
    """

    ids: IntArray
    is_image: BoolArray
    rows: IntArray
    positions: IntArray | None
    blocks: IntArray | None

    @cached_property
    def codes(self) -> IntArray:
        """Return codes, (T,), int64, equal for tokens with the same id or feature row, positions, and whole block."""
        codes = self.ids.copy()
        codes[self.is_image] = self.ids.max(initial=0) + 1 + self.rows
        for axis in () if self.positions is None else np.atleast_2d(self.positions):
            codes = _of_pairs(codes, axis)
        return codes if self.blocks is None else _of_pairs(codes, whole_blocks(codes, self.blocks))

    def rows_at(self, tokens: IntArray) -> IntArray:
        """Return the rows of the features for those of these tokens that are placeholders."""
        rows: IntArray = self.rows[self.is_image.cumsum()[tokens[self.is_image[tokens]]] - 1]
        return rows

    def axes_at(self, tokens: IntArray) -> IntArray | None:
        """Return the positions of these tokens on several axes, (A, U); None if they count along each sequence."""
        return None if self.positions is None or self.positions.ndim == 1 else self.positions[:, tokens]

    def blocks_of(self, plan: PrefixPlan, tokens: IntArray | None = None) -> BlockLayout | None:
        """Find the blocks of unique rows; None if none has two.

        tokens: (U,). for each row, an equal one of the T, if the plan is not of these. Equal images of two sequences
            may then be neighbours.
        """
        if self.blocks is None:
            return None
        owners = np.arange(len(plan.cu_seqlens) - 1).repeat(lengths_of(plan.cu_seqlens))[plan.gather_indices]
        blocks = numbered_apart(self.blocks[plan.gather_indices if tokens is None else tokens], owners)
        blocks[plan.num_unique_tokens :] = -1
        return BlockLayout.of(blocks)


def numbered_apart(blocks: IntArray, owners: IntArray) -> IntArray:
    """Number blocks so that those of different owners differ, -1 outside. owners: of each block, broadcast."""
    return np.where(blocks < 0, -1, blocks + owners * (blocks.max(initial=-1) + 1))


def whole_blocks(codes: IntArray, blocks: IntArray) -> IntArray:
    """Number the blocks of all tokens, (T,), so that two are the same if all their codes are; -1 outside."""
    numbers: dict[bytes, int] = {}
    found = np.full_like(blocks, -1)
    starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(blocks)]):
        if blocks[start] >= 0:
            found[start:end] = numbers.setdefault(codes[start:end].tobytes(), len(numbers))
    return found


def _of_pairs(codes: IntArray, others: IntArray) -> IntArray:
    """Number the distinct pairs, (T,). codes: not negative."""
    places = others - others.min(initial=0)
    pairs: IntArray = np.unique(codes * (places.max(initial=0) + 1) + places, return_inverse=True)[1]
    return pairs
