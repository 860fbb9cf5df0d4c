"""Images of prompts: the tower computes each distinct one once; prompts share it and the tokens before it.

    input_ids  7 <img> <img> 8    images  A    keys  0 1 2 3
               7 <img> <img> 9            A          0 1 2 7
               7 <img> <img> 8            B          0 9 10 11

A key is the first token of the batch that is the same: with the same id or row of an image, at the same positions.
The plan and the cache of a call, which otherwise compare token ids, compare these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.image_models import axes_of, given_of_images, why_not
from radixtrain.hf.padded.images import Images
from radixtrain.hf.padded.rows import PaddedRows
from radixtrain.images.tokens import ImageTokens
from radixtrain.images.tower import NotShared, Tower
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.cached_layout import Continuations, on_device

INSTEAD = "use model.generate"


def has_images(prompts: object) -> bool:
    """Return whether prompts are what a model's processor returns for texts with images."""
    return isinstance(prompts, Mapping) and prompts.get("pixel_values") is not None


def text_of(backbone: PreTrainedModel, prompts: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from prompts what only their images need."""
    names = given_of_images(backbone, prompts)
    return {name: value for name, value in prompts.items() if name not in names}


@dataclass(eq=False)
class PromptImages:
    """The images of B prompts, and their T tokens without padding.

    keys: of each prompt, (n,), int64.
    shifts: (B,), or (B, A) on several axes, int64. Offset of an answer's positions from its places: they continue
        those of the prompt, as in `model.generate`.
    """

    tower: Tower
    tokens: ImageTokens
    keys: list[IntArray]
    shifts: IntArray

    @classmethod
    def read(
        cls, backbone: PreTrainedModel, prompts: Mapping[str, Any], attention_mask: object, device: torch.device
    ) -> PromptImages:
        """Run the tower, in evaluation mode without gradients. Raises UserError for what cannot be shared exactly."""
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in prompts.items()}
        if not isinstance(given["input_ids"], Tensor):
            raise UserError("prompts with images: expected tensors, as processor(..., return_tensors='pt') makes them")
        if attention_mask is not None:
            given["attention_mask"] = torch.as_tensor(attention_mask, device=device)
        given = {name: value for name, value in given.items() if value is not None}
        rows = PaddedRows.read(given["input_ids"], given.get("attention_mask"), None)
        reason = "a mask with a hole" if rows.has_holes else why_not(backbone, given)
        try:
            if reason is not None:
                raise NotShared(reason)
            images = Images.read(backbone, given, rows, axes_of(backbone, given))
            images.tower.check_complete(len(images.tokens.rows))
        except NotShared as error:
            raise UserError(f"prompts with images: {error}; {INSTEAD}") from None
        _, first, inverse = np.unique(images.tokens.codes, return_index=True, return_inverse=True)
        keys = np.split(first[inverse].astype(np.int64), rows.cu_seqlens[1:-1])
        last = images.tokens.axes_at(rows.cu_seqlens[1:] - 1)
        lengths = np.diff(rows.cu_seqlens)
        shifts = np.zeros_like(lengths) if last is None else last.T + 1 - lengths[:, None]
        return cls(images.tower, images.tokens, keys, shifts)

    def inputs_of(self, keys: IntArray, device: torch.device) -> dict[str, Any]:
        """Return what a pass computes for these keys, (U,): ids, positions of several axes, and features."""
        inputs: dict[str, Any] = {"input_ids": on_device(self.tokens.ids[keys], device)}
        axes, rows = self.tokens.axes_at(keys), self.tokens.rows_at(keys)
        if axes is not None:
            inputs["position_ids"] = on_device(axes, device)
        if len(rows):
            inputs["features"] = self.tower.argument_at(on_device(rows, device))
        return inputs

    def blocks_of(self, ends: Continuations, device: torch.device) -> BlockLayout | None:
        """Find the rows of these ends that attend in both directions."""
        layout = self.tokens.blocks_of(ends.plan, ends.ids)
        return None if layout is None else layout.to(device)
