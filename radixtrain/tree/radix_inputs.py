"""What a batch carries for radixtrain besides ordinary model inputs: one object, `batch["radix"]`.

It moves as a tensor does, so that a DataLoader, Accelerate, Lightning and `{name: x.to(device)}` move it too. What
moves only tensors (Hugging Face's `Trainer`, DistributedDataParallel, FSDP) passes it on as it is, and the hook of a
shared model moves it. All that goes to a device is one tensor, so moving is one copy. Everything that the host has to
know for a kernel launch was computed in the DataLoader worker and stays on the host: on a device, nothing is read back.

T packed tokens, U unique rows, B sequences, R rows that predict, P predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import Function, Movable, TreeLayout

RADIX = "radix"  # its key in a batch


def _section(name: str) -> Any:
    """Make a property: a section of `rows`; None if there is none."""
    return property(lambda radix: radix.tensor(name))


@dataclass(eq=False, kw_only=True)
class RadixInputs(Movable):
    """What a shared model and radixtrain's losses read from a batch.

    rows: int32, the only tensor that moves: the bits of all others, back to back, int64 first.
    sections: where each of the others is in `rows`, and its dtype.
    host: of the layout, on the CPU; None in a padded batch.
    place_rows: (B, P / B), int64, on the host. `prediction_rows`, for a model that computes its own loss: its head gets
        a row for each of them; -1 for those without a label. None if it gets the R predictors.
    token_loss: whether the loss is known to be a sum over tokens, whoever computes it.
    num_tokens: original tokens that the batch adds to its step, if they are not those of its sequences: 0 for one that
        only fills up.
    split: the number of rows in all, or a `SplitLoss`, if a rank of an `sp_group` holds only some of them.

    The sections, each of them a view:

    plan: int32. `rows` of the layout; None in a padded batch.
    cu_seqlens: (B+1,), int32. bounds of the sequences, back to back.
    predictor_indices: (R,), int64. the row of each predictor, ascending.
    prediction_rows: (P,), int64. which of the R predictors each entry of `shift_labels` belongs to.
    loss_weights: (P,). how many original tokens each entry stands for, int64; or its given weight, float32.
    label_indices: (P,), int64. the original token that each entry is, counted over all features back to back; None if
        an entry may stand for several.
    """

    rows: Tensor
    sections: dict[str, tuple[slice, torch.dtype]]
    host: Tensor | None = None
    place_rows: IntArray | None = None
    token_loss: bool = False
    num_tokens: int | None = None
    split: Any = None

    cu_seqlens = _section("cu_seqlens")
    predictor_indices = _section("predictor_indices")
    prediction_rows = _section("prediction_rows")
    loss_weights = _section("loss_weights")
    label_indices = _section("label_indices")

    @classmethod
    def of(cls, **given: Any) -> RadixInputs:
        """Make one of these fields, of which tensors become sections, except `host`."""
        return cls(**_encoded(given))

    def map(self, function: Function) -> RadixInputs:
        """Replace `rows`; return the object itself if nothing changes. `host` stays where it is."""
        rows = function(self.rows)
        return self if rows is self.rows else replace(self, rows=rows)

    def tensor(self, name: str) -> Any:
        """Return a section; None if there is none."""
        if name not in self.sections:
            return None
        place, dtype = self.sections[name]
        return self.rows[place].view(dtype)

    @property
    def layout(self) -> TreeLayout | None:
        """Return the plan of the unique tokens; None in a padded batch, whose B x L flattened tokens are the rows.

        A new one at each reading: what layers cache in it has the dtype and the mode of one call.
        """
        return None if self.host is None else TreeLayout(self.host, self.tensor("plan"))


def _encoded(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the tensors among these fields, except `host`, by `rows` and `sections`."""
    found = {name: x for name, x in given.items() if isinstance(x, Tensor) and name != "host"}
    sections, parts, end = {}, [], 0
    for name in sorted(found, key=lambda name: -found[name].itemsize):  # an int64 starts at an even place
        x = found[name]
        parts.append(x.view(torch.int32) if len(x) else x.int())  # an empty one may have stride 0
        start, end = end, end + len(parts[-1])
        sections[name] = slice(start, end), x.dtype
    known = {name: given[name] for name in given.keys() - found.keys()}
    return {"rows": torch.cat(parts), "sections": sections, **known}


def radix_of(batch: Mapping[str, Any]) -> RadixInputs:
    """Return the `RadixInputs` of a batch."""
    found: RadixInputs = batch[RADIX]
    return found


def with_radix(batch: Mapping[str, Any], **fields: object) -> dict[str, Any]:
    """Copy the batch with other values in some fields of its `RadixInputs`, or other tensors in place of its own."""
    radix = radix_of(batch)
    tensors = {name: radix.tensor(name) for name in radix.sections}
    return {**batch, RADIX: replace(radix, **_encoded(tensors | fields))}


def layout_of(batch: Mapping[str, Any]) -> TreeLayout:
    """Return the layout of the plan of a `RadixCollator`'s batch."""
    layout = radix_of(batch).layout
    assert layout is not None, "a padded batch"
    return layout
