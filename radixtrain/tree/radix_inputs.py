"""What a batch carries for radixtrain besides ordinary model inputs: one object, `batch["radix"]`.

It moves as a tensor does, so that a DataLoader, Accelerate, Lightning and `{name: x.to(device)}` move it too. What
moves only tensors (Hugging Face's `Trainer`, DistributedDataParallel, FSDP) passes it on as it is, and the hook of a
prepared model moves it. All that goes to a device is one tensor, so moving is one copy. Everything that the host has to
know for a kernel launch was computed in the DataLoader worker and stays on the host: on a device, nothing is read back.

T packed tokens, U unique rows, B sequences, R rows that predict, P predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.movable import Function, Movable

RADIX = "radix"  # its key in a batch
PLAN = "plan"  # the section of the layout


def _tensor(name: str) -> Any:
    """Make a property: a section of `rows`, None if there is none. float32 is a view; int64 is made at each reading.

    It is not cached: made in inference mode, it could not be saved for a backward pass.
    """
    return property(lambda radix: radix.tensor(name))


@dataclass(eq=False, kw_only=True)
class RadixInputs(Movable):
    """What a prepared model and radixtrain's losses read from a batch.

    rows: int32, the only tensor that moves: sections back to back, the bits of those that are float32.
    host: of the layout, on the CPU; None without one.
    sections: start, end and dtype of each section that there is.
    place_rows: (B, P / B), int64, on the host. `prediction_rows`, for a model that computes its own loss: its head gets
        a row for each of them; -1 for those without a label. None if it gets the R predictors.
    strategy, min_shared_tokens: what a `StepCost` chose; None without one.
    token_loss: whether the loss is known to be a sum over tokens, whoever computes it.
    is_left_padded: whether a feature was padded on the left and had no `position_ids`. They count from 0 here and from
        the padding in Hugging Face: the same for rotary embeddings, but not for learned ones.
    image_pieces: of each piece: how many placeholders it has, and which of the distinct images these show.
    num_tokens: original tokens that the batch adds to its step, if they are not those of its sequences: 0 for one that
        only fills up.
    split: the number of rows in all, or a `SplitLoss`, if a rank of an `sp_group` holds only some of them.

    The sections, each of which is a tensor:

    predictor_indices: (R,), int64. the row of each predictor, ascending.
    prediction_rows: (P,), int64. which of the R predictors each entry of `shift_labels` belongs to.
    loss_weights: (P,). how many original tokens each entry stands for, int64; or its given weight, float32.
    label_indices: (P,), int64. the original token that each entry is, counted over all features back to back; None if
        an entry may stand for several.
    old_logprobs, advantages: (P,), float32. as they were given, if they were.
    image_rows: (placeholders among U,), int64. which row of the pieces stands at each unique placeholder.
    """

    rows: Tensor
    host: Tensor | None
    sections: dict[str, tuple[int, int, torch.dtype]]
    place_rows: IntArray | None = None
    strategy: str | None = None
    min_shared_tokens: int | None = None
    token_loss: bool = False
    is_left_padded: bool = False
    image_pieces: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_tokens: int | None = None
    split: Any = None

    predictor_indices = _tensor("predictor_indices")
    prediction_rows = _tensor("prediction_rows")
    loss_weights = _tensor("loss_weights")
    label_indices = _tensor("label_indices")
    old_logprobs = _tensor("old_logprobs")
    advantages = _tensor("advantages")
    image_rows = _tensor("image_rows")

    @classmethod
    def of(cls, layout: TreeLayout | None, tensors: Mapping[str, Tensor], **known: Any) -> RadixInputs:
        """Encode the sections. layout: None in a padded batch, which has `cu_seqlens` among its tensors."""
        return cls(**_encoded(layout, tensors), **known)

    def map(self, function: Function) -> RadixInputs:
        """Replace `rows`; return the object itself if nothing changes. `host` stays where it is."""
        rows = function(self.rows)
        return self if rows is self.rows else replace(self, rows=rows)

    def tensor(self, name: str) -> Any:
        """Return a section of `rows` in its own dtype; None if there is none."""
        if name not in self.sections:
            return None
        start, end, dtype = self.sections[name]
        section = self.rows[start:end]
        return section.long() if dtype == torch.int64 else section.view(dtype)

    @property
    def layout(self) -> TreeLayout | None:
        """Return the plan of the unique tokens; None in a padded batch, whose B x L flattened tokens are the rows.

        A new one at each reading: what layers cache in it has the dtype and the mode of one call.
        """
        return None if self.host is None else TreeLayout(self.host, self.tensor(PLAN))

    @property
    def cu_seqlens(self) -> Tensor:
        """Return the bounds of the sequences, back to back, (B+1,), int32."""
        found: Tensor = self.tensor("cu_seqlens") if self.layout is None else self.layout.cu_seqlens
        return found


def _encoded(layout: TreeLayout | None, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Make the fields that hold the layout and these tensors."""
    given = {PLAN: None if layout is None else layout.rows, **tensors}
    found = {name: tensor for name, tensor in given.items() if tensor is not None}
    bounds = pairwise(accumulate(map(len, found.values()), initial=0))
    return {
        "rows": torch.cat([_as_int32(tensor) for tensor in found.values()]),
        "host": None if layout is None else layout.host,
        "sections": {name: (*each, found[name].dtype) for name, each in zip(found, bounds, strict=True)},
    }


def _as_int32(tensor: Tensor) -> Tensor:
    """Narrow int64, which counts tokens of a batch, and take float32 bit by bit."""
    if tensor.dtype != torch.int64:
        assert tensor.dtype in (torch.int32, torch.float32), tensor.dtype
        return tensor.view(torch.int32)
    narrow = tensor.int()
    assert tensor.device.type != "cpu" or bool((narrow == tensor).all()), "2^31 tokens"  # a device would be waited for
    return narrow


def radix_of(batch: Mapping[str, Any]) -> RadixInputs:
    """Return the `RadixInputs` of a batch."""
    found: RadixInputs = batch[RADIX]
    return found


def with_radix(batch: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Copy the batch with another layout, other tensors or other values in some fields of its `RadixInputs`."""
    radix, properties = radix_of(batch), vars(RadixInputs)
    tensors = {name: fields.pop(name) for name in list(fields) if isinstance(properties.get(name), property)}
    if tensors:
        layout = tensors.pop("layout", radix.layout)
        own = {name: radix.tensor(name) for name in radix.sections if name != PLAN}
        fields.update(_encoded(layout, own | tensors))
    return {**batch, RADIX: replace(radix, **fields)}


def layout_of(batch: Mapping[str, Any]) -> TreeLayout:
    """Return the layout of the plan of a `RadixCollator`'s batch."""
    layout = radix_of(batch).layout
    assert layout is not None, "a padded batch"
    return layout
