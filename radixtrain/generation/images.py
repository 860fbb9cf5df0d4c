"""Images of prompts: the tower computes each distinct one once, and prompts share what stands before and in it.

    input_ids  7 <img> <img> 8    images  A    keys  0 1 2 3
               7 <img> <img> 9            A          0 1 2 7
               7 <img> <img> 8            B          0 9 10 11

A key is the first token of the batch that is the same: with the same id or row of an image, at the same positions.
What tells tokens apart by their ids elsewhere, the plan and the cache of a call, tells them apart by their keys here.
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
from radixtrain.hf.padded.images import Images
from radixtrain.hf.padded.rows import PaddedRows
from radixtrain.hf.tower import FEATURES, given_of_images, position_ids_of, why_not
from radixtrain.tree.arrays import IntArray, lengths_of
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.cached_layout import Continuations, on_device

INSTEAD = "use model.generate"


def has_images(prompts: Any) -> bool:
    """Whether prompts are what a model's processor returns for texts with images."""
    return isinstance(prompts, Mapping) and prompts.get("pixel_values") is not None


def text_of(backbone: PreTrainedModel, prompts: Mapping[str, Any]) -> dict[str, Any]:
    """The prompts without what only their images need."""
    names = given_of_images(backbone, prompts) if hasattr(backbone, "get_image_features") else set()
    return {name: value for name, value in prompts.items() if name not in names}


@dataclass(eq=False)
class PromptImages:
    """The images of B prompts, T tokens without padding.

    images: of all. ids: (T,), int64. axes: (A, T), int64, positions; None if they count along each prompt.
    keys: of each prompt, (n,), int64.
    shifts: (B,), or (B, A) on several axes, int64. How far the positions of an answer are from its places: they go on
        from the last ones of the prompt, as in `model.generate`.
    """

    images: Images
    ids: IntArray
    axes: IntArray | None
    keys: list[IntArray]
    shifts: IntArray

    @classmethod
    def read(
        cls, backbone: PreTrainedModel, prompts: Mapping[str, Any], attention_mask: Any, device: torch.device
    ) -> PromptImages:
        """Runs the tower. In evaluation mode and without gradients. UserError for what cannot be shared exactly."""
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in prompts.items()}
        if not isinstance(given["input_ids"], Tensor):
            raise UserError("prompts with images: expected tensors, as processor(..., return_tensors='pt') makes them")
        if attention_mask is not None:
            given["attention_mask"] = torch.as_tensor(attention_mask, device=device)
        given = {name: value for name, value in given.items() if value is not None}
        rows = PaddedRows.read(given["input_ids"], given.get("attention_mask"), None)
        reason = "a mask with a hole" if rows.has_holes else why_not(backbone, given)
        positions = None if reason else position_ids_of(backbone, given)
        found = reason or Images.read(backbone, given, rows, positions)
        reason = found if isinstance(found, str) else found.tower.why_not_complete(len(found.rows))
        if reason is not None:
            raise UserError(f"prompts with images: {reason}; {INSTEAD}")
        assert isinstance(found, Images)
        _, first, inverse = np.unique(found.codes, return_index=True, return_inverse=True)
        bounds = rows.cu_seqlens
        axes, lengths = None, np.diff(bounds)
        shifts = np.zeros_like(lengths)
        if positions is not None:
            axes = positions.flatten(1).cpu().numpy()[:, found.kept]
            shifts = axes[:, bounds[1:] - 1].T + 1 - lengths[:, None]
        keys = np.split(first[inverse].astype(np.int64), bounds[1:-1])
        return cls(found, rows.input_ids[rows.kept], axes, keys, shifts)

    def inputs_of(self, keys: IntArray, device: torch.device) -> dict[str, Any]:
        """What a pass computes in place of these keys, (U,): ids, positions of several axes, and features."""
        inputs: dict[str, Any] = {"input_ids": on_device(self.ids[keys], device)}
        if self.axes is not None:
            inputs["position_ids"] = on_device(self.axes[:, keys], device)
        placeholders = keys[self.images.is_image[keys]]
        if len(placeholders):
            rows = self.images.rows[self.images.is_image.cumsum()[placeholders] - 1]
            features = self.images.tower.features_at(on_device(rows, device))
            inputs["features"] = {FEATURES: {"image": features}}
        return inputs

    def blocks_of(self, ends: Continuations, device: torch.device) -> BlockLayout | None:
        """The rows of these ends that attend in both directions. Equal images of two prompts may be neighbours."""
        blocks = self.images.blocks
        if blocks is None:
            return None
        owners = np.arange(len(ends.num_stored)).repeat(lengths_of(ends.plan.cu_seqlens))[ends.plan.gather_indices]
        found, total = blocks[ends.ids], int(blocks.max(initial=-1)) + 1
        layout = BlockLayout.of(np.where(found < 0, -1, found + owners * total))
        return None if layout is None else layout.to(device)
