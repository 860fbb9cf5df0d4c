"""A micro-batch -> the part that one of n ranks computes.

The first rank has the first ceil(U / n) rows, and so on. The last ones are filled up by copies of the first row, which
reach nothing, so that every rank has as many rows. Experts that copies are routed to are reached anyway.

Data parallel computes a prefix on every rank that has a sequence of it; a group of `sp_size` ranks computes it once and
sends rows and heads around attention (`hf/sequence_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixtrain.collators.token_row import IGNORE_INDEX
from radixtrain.tree.radix_inputs import layout_of, radix_of, with_radix

OF_ROWS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}  # entries by rows, and the dimension of the rows
OF_PREDICTIONS = ("loss_weights", "label_indices")  # a number for each prediction


class RowShare(NamedTuple):
    """The rows of one rank of a group. rank: from 0. size: number of ranks."""

    rank: int
    size: int

    def count(self, num_rows: int) -> int:
        """Return ceil(U / size), the same on every rank."""
        return -(-num_rows // self.size)

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the rows of the rank, filled up with copies of the first: U of `dim` -> ceil(U / size)."""
        num_rows, count = x.shape[dim], self.count(x.shape[dim])
        start = min(self.rank * count, num_rows)
        return filled(x.narrow(dim, start, min(count, num_rows - start)), x.narrow(dim, 0, 1), dim, count)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the entries of a batch that have a place for each row, for the rows of the rank."""
        return {name: self.of(batch[name], dim) for name, dim in OF_ROWS.items() if batch.get(name) is not None}


def filled(rows: Tensor, first: Tensor, dim: int, count: int) -> Tensor:
    """Return `count` rows along `dim`: these, then copies of `first`, which has one."""
    missing = count - rows.shape[dim]
    return torch.cat([rows, *[first] * missing], dim) if missing else rows


def split_batch(batch: Mapping[str, Any], share: RowShare) -> dict[str, Any]:
    """Return the part of one rank: its rows, and the labelled predictions that they make.

    batch: of a `RadixCollator`, with its rows in one row.

    The layout stays that of all rows. An ignored prediction of weight 0 is added, so that a rank without any runs the
    same passes; and another one if there were as many as rows, since layers may receive the labels, and would take them
    for rows.
    """
    radix, labels, num_rows = radix_of(batch), batch["shift_labels"].flatten(), layout_of(batch).num_rows
    count = share.count(num_rows)
    rows = radix.predictor_indices[radix.prediction_rows] - share.rank * count
    own = ((rows >= 0) & (rows < count) & (labels != IGNORE_INDEX)).nonzero()[:, 0]
    num_ignored = 2 if len(own) + 1 == count else 1

    def of_own(values: Tensor, ignored: int = 0) -> Tensor:
        return pad(values[own], (0, num_ignored), value=ignored)

    own_labels = of_own(labels, IGNORE_INDEX)[None]
    predictors, prediction_rows = of_own(rows).unique(return_inverse=True)
    fields: dict[str, Any] = {"predictor_indices": predictors, "prediction_rows": prediction_rows}
    fields |= {name: of_own(getattr(radix, name)) for name in OF_PREDICTIONS if getattr(radix, name) is not None}
    targets = {"shift_labels": own_labels}
    if radix.place_rows is not None:  # for a model that computes its own loss
        targets["labels"] = own_labels.roll(1)
        fields["place_rows"] = prediction_rows[None].masked_fill(own_labels == IGNORE_INDEX, -1).cpu().numpy()
    return with_radix({**batch, **share.inputs(batch), **targets}, **fields, split=num_rows)
