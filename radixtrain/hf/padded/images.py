"""The images of a padded call: each placeholder is a row of the features that the tower computes of distinct images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.hf.backbone import text_decoder_of
from radixtrain.hf.image_models import blocks_of, image_token_of, sees_beyond_windows, types_for, without_images
from radixtrain.hf.padded.rows import PaddedRows
from radixtrain.hf.windows import window_may_bind
from radixtrain.images.tokens import ImageTokens
from radixtrain.images.tower import NotShared, Tower
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.movable import on_device


@dataclass(eq=False)
class Images:
    """The images of a padded call, its tokens without padding, and how many placeholders each row has, (B,)."""

    tower: Tower
    tokens: ImageTokens
    num_placeholders: IntArray

    @classmethod
    def read(cls, backbone: PreTrainedModel, given: Mapping[str, Any], rows: PaddedRows, axes: Tensor | None) -> Images:
        """Read the images of a call, and wait for the device. Raises NotShared if they cannot be shared.

        axes: (A, B, L), positions on several axes; None if they count along each row.
        """
        is_placeholder = rows.input_ids == image_token_of(backbone)
        if (is_placeholder & ~rows.kept).any():
            raise NotShared("attention_mask hides placeholders of images")
        is_packed = axes is not None and len(axes) == 4 and given.get("attention_mask") is None
        if is_packed and bool((axes[0].diff(dim=-1) != 1).any()):  # type: ignore[index]
            raise NotShared("position_ids jump within a row")
        tower = Tower.read(backbone, given)
        is_image = is_placeholder[rows.kept]
        tokens = ImageTokens(
            ids=rows.input_ids[rows.kept],
            is_image=is_image,
            rows=tower.rows_at(int(is_image.sum())),
            positions=rows.kept_positions if axes is None else axes.cpu().numpy()[:, rows.kept],
            blocks=blocks_of(backbone, given, rows.kept),
        )
        _check_blocks(backbone, rows, tokens.blocks)
        return cls(tower, tokens, is_placeholder.sum(1))

    def in_place_of(
        self, backbone: PreTrainedModel, arguments: Mapping[str, Any], tokens: IntArray, layout: TreeLayout
    ) -> dict[str, Any]:
        """Return the arguments of a call with the features of its unique tokens. Raises NotShared if they do not fit.

        tokens: (U,), which of the T each one is. layout: of these.
        """
        self.tower.check_complete(len(self.tokens.rows))
        device, axes = arguments["input_ids"].device, self.tokens.axes_at(tokens)
        left = without_images(arguments) | types_for(backbone, layout)
        if axes is not None:
            left["position_ids"] = on_device(axes, device)[:, None]
        return left | self.tower.argument_at(on_device(self.tokens.rows_at(tokens), device))

    def output_of_every(self, features_at: Callable[[IntArray], Tensor]) -> Any:
        """Return what the tower returns for all images: features, and what else has one entry for each image.

        features_at: rows of all features.
        """
        tower, output, owners = self.tower, self.tower.output, self.tower.owners
        if not tower.has_copies and not tower.is_nested:
            return output
        of_each = {name: x for name, x in output.items() if isinstance(x, Tensor) and len(x) == tower.num_distinct}
        entries: dict[str, Any] = {name: x[on_device(owners, x.device)] for name, x in of_each.items()}
        if isinstance(output.pooler_output, Tensor):
            entries["pooler_output"] = features_at(tower.features_at_each(self.tokens.rows)[1])
        elif tower.is_nested:  # Idefics: a piece for each row
            pieces = np.split(self.tokens.rows, np.cumsum(self.num_placeholders)[:-1])
            entries["pooler_output"] = [features_at(rows) for rows in pieces]
        else:
            entries["pooler_output"] = [output.pooler_output[owner] for owner in owners]
        if levels := output.get("deepstack_features"):
            entries["deepstack_features"] = [[level[owner] for owner in owners] for level in levels]
        return type(output)(**entries)


def _check_blocks(backbone: PreTrainedModel, rows: PaddedRows, blocks: IntArray | None) -> None:
    """Raise NotShared if tokens of an image would see others of it than in the call. blocks: as in `ImageTokens`."""
    if blocks is not None and rows.is_packed:  # transformers reads the types at other places
        raise NotShared("a row has several sequences, and its images attend in both directions")
    longest = 0 if blocks is None else int(np.unique(blocks[blocks >= 0], return_counts=True)[1].max(initial=0))
    if window_may_bind(text_decoder_of(backbone).config, longest) and sees_beyond_windows(backbone):
        raise NotShared("an image is longer than a window, beyond which its tokens see each other")
