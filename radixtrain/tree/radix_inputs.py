"""What a batch carries for radixtrain besides ordinary model inputs: one object, `batch["radix"]`.

It moves as a tensor does, so that a DataLoader, Accelerate, Lightning and `{name: x.to(device)}` move it too. What
moves only tensors (Hugging Face's `Trainer`, DistributedDataParallel, FSDP) passes it on as it is, and the hook of a
prepared model moves it. Everything that the host has to know for a kernel launch is an int that was computed in the
DataLoader worker: on a device, nothing here is read back.

T packed tokens, U unique rows, B sequences, R rows that predict, P predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.movable import Movable

RADIX = "radix"  # its key in a batch


@dataclass(frozen=True, eq=False, kw_only=True)
class RadixInputs(Movable):
    """What a prepared model and radixtrain's losses read from a batch.

    layout: the plan of the unique tokens; None in a padded batch, whose B x L flattened tokens are the rows.
    cu_seqlens: (B+1,), int32. bounds of the sequences, back to back.
    predictor_indices: (R,), int64. the row of each predictor, ascending.
    prediction_rows: (P,), int64. which of the R predictors each entry of `shift_labels` belongs to.
    place_rows: (B, P / B), int64, on the host. `prediction_rows`, for a model that computes its own loss: its head gets
        a row for each of them; -1 for those without a label. None if it gets the R predictors.
    loss_weights: (P,). how many original tokens each entry stands for, int64; or its given weight, float32.
    label_indices: (P,), int64. the original token that each entry is, counted over all features back to back; None if
        an entry may stand for several.
    old_logprobs, advantages: (P,), float32. as they were given, if they were.
    token_loss: whether the loss is known to be a sum over tokens, whoever computes it.
    is_left_padded: whether a feature was padded on the left and had no `position_ids`. They count from 0 here and from
        the padding in Hugging Face: the same for rotary embeddings, but not for learned ones.
    image_rows: (placeholders among U,), int64. which row of the pieces stands at each unique placeholder.
    image_pieces: of each piece: how many placeholders it has, and which of the distinct images these show.
    num_tokens: original tokens that the batch adds to its step, if they are not those of its sequences: 0 for one that
        only fills up.
    split: the number of rows in all, or a `SplitLoss`, if a rank of an `sp_group` holds only some of them.
    """

    layout: TreeLayout | None
    cu_seqlens: Tensor
    predictor_indices: Tensor
    prediction_rows: Tensor
    loss_weights: Tensor
    place_rows: IntArray | None = None
    label_indices: Tensor | None = None
    old_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    token_loss: bool = False
    is_left_padded: bool = False
    image_rows: Tensor | None = None
    image_pieces: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_tokens: int | None = None
    split: Any = None


del RadixInputs.__dataclass_fields__  # Lightning and FSDP take dataclasses apart, and cast what floats they find


def radix_of(batch: Mapping[str, Any]) -> RadixInputs:
    """Return the `RadixInputs` of a batch."""
    found: RadixInputs = batch[RADIX]
    return found


def with_radix(batch: Mapping[str, Any], **fields: object) -> dict[str, Any]:
    """Copy the batch with other values in some fields of its `RadixInputs`."""
    return {**batch, RADIX: radix_of(batch).changed(**fields)}


def layout_of(batch: Mapping[str, Any]) -> TreeLayout:
    """Return the layout of the plan of a `RadixCollator`'s batch."""
    layout = radix_of(batch).layout
    assert layout is not None, "a padded batch"
    return layout
