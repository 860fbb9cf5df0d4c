"""Images of a padded call: every placeholder is one row of the features that the tower computes of distinct images.

    input_ids  7 <img> <img> 8    images  A    features  A0 A1    tokens compared  7 A0 A1 8
               7 <img> <img> 9            A                                        7 A0 A1 9

What makes two images one is said in `collators/images.py`, what computes them in `radixtrain/hf/tower.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.collators.images import codes_of, codes_of_blocks
from radixtrain.hf.backbone import text_decoder_of
from radixtrain.hf.padded.rows import BoolArray, PaddedRows
from radixtrain.hf.tower import (
    FEATURES,
    Tower,
    block_function_of,
    image_token_of,
    sees_beyond_windows,
    types_for,
    types_of_mask,
    without_images,
)
from radixtrain.hf.windows import window_may_bind
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.cached_layout import on_device
from radixtrain.tree.layout import TreeLayout


@dataclass(eq=False)
class Images:
    """The N images of a padded call, K of them distinct, and its T tokens, of which P are placeholders of images.

    codes: (T,), int64. Equal where two tokens have the same id, row of the features and positions.
    is_image: (T,), bool. rows: (P,), int64. The row of the features at each placeholder.
    blocks: (T,), int64. As in `codes_of_blocks`; None if all tokens attend only backwards.
    positions: (A, B, L), and kept: (T,), int64, where in it the tokens stand; None if positions count along each row.
    """

    tower: Tower
    codes: IntArray
    is_image: BoolArray
    rows: IntArray
    positions: Tensor | None
    kept: IntArray
    blocks: IntArray | None

    @classmethod
    def read(
        cls, backbone: PreTrainedModel, given: Mapping[str, Any], rows: PaddedRows, positions: Tensor | None
    ) -> Images | str:
        """The images of a call that can be shared, or why these cannot. Waits for the device."""
        token = image_token_of(backbone)
        if (rows.input_ids[~rows.kept] == token).any():
            return "attention_mask hides placeholders of images"
        is_packed = positions is not None and len(positions) == 4 and given.get("attention_mask") is None
        if is_packed and bool((positions[0].diff(dim=-1) != 1).any()):  # type: ignore[index]
            return "position_ids jump within a row"
        tower = Tower.read(backbone, given)
        if isinstance(tower, str):
            return tower
        ids, kept = rows.input_ids[rows.kept], np.flatnonzero(rows.kept)
        is_image = ids == token
        features = tower.rows_at(int(is_image.sum()))
        if isinstance(features, str):
            return features
        axes = rows.kept_positions if positions is None else positions.flatten(1).cpu().numpy()[:, kept]
        types = given.get(types_of_mask(backbone) or "")
        if types is not None and types.shape != given["input_ids"].shape:
            return f"{types_of_mask(backbone)} is not [B, L]"
        blocks = _blocks(backbone, given, rows)
        if blocks is not None and rows.is_packed:  # transformers reads the types at other places
            return "a row has several sequences, and its images attend in both directions"
        longest = 0 if blocks is None else int(np.unique(blocks[blocks >= 0], return_counts=True)[1].max(initial=0))
        if window_may_bind(text_decoder_of(backbone).config, longest) and sees_beyond_windows(backbone):
            return "an image is longer than a window, beyond which its tokens see each other"
        codes = codes_of(ids, is_image, features, () if axes is None else np.atleast_2d(axes))
        codes = codes if blocks is None else codes_of_blocks(codes, blocks)
        return cls(tower, codes, is_image, features, positions, kept, blocks)

    def in_place_of(self, arguments: Mapping[str, Any], tokens: IntArray, layout: TreeLayout) -> dict[str, Any] | str:
        """The arguments of a call with the features of its unique tokens; or why they do not fit its placeholders.

        tokens: (U,), which of the T each one is. layout: of these.
        """
        reason = self.tower.why_not_complete(len(self.rows))
        if reason is not None:
            return reason
        number_of = self.is_image.cumsum() - 1
        places = self.rows[number_of[tokens[self.is_image[tokens]]]]
        left = without_images(arguments) | types_for(self.tower.backbone, layout.blocks, layout.max_seqlen)
        if self.positions is not None:
            index = on_device(self.kept[tokens], self.positions.device)
            left["position_ids"] = self.positions.flatten(1).index_select(1, index)[:, None]
        return {**left, FEATURES: {"image": self.tower.features_at(on_device(places, arguments["input_ids"].device))}}


def _blocks(backbone: PreTrainedModel, given: Mapping[str, Any], rows: PaddedRows) -> IntArray | None:
    """(T,). The blocks that attend in both directions, of the tokens without padding; None if there are none."""
    types, count_blocks = given.get(types_of_mask(backbone) or ""), block_function_of(backbone)
    if types is None or count_blocks is None:
        return None
    of_rows = count_blocks(types, device=types.device).cpu().numpy()
    first = np.arange(len(of_rows))[:, None] * (of_rows.max() + 1)
    return np.where(of_rows < 0, -1, of_rows + first)[rows.kept]
