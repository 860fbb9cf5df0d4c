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

from radixtrain.tree.radix_inputs import radix_of, with_radix

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

    def predictors(self, predictor_indices: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the place of each predictor among the rows of the rank, int64, and whether it is one of them, bool.

        predictor_indices: of `num_rows` rows.
        """
        count = self.count(num_rows)
        rows = predictor_indices - self.rank * count
        return rows, (rows >= 0) & (rows < count)


def filled(rows: Tensor, first: Tensor, dim: int, count: int) -> Tensor:
    """Return `count` rows along `dim`: these, then copies of `first`, which has one."""
    missing = count - rows.shape[dim]
    return torch.cat([rows, *[first] * missing], dim) if missing else rows


def split_batch(batch: Mapping[str, Any], share: RowShare) -> dict[str, Any]:
    """Return the part of one rank. batch: of a `RadixCollator` with `merge_labels`.

    The layout stays that of all rows. A rank without predictions gets one of weight 0, so that it runs the same passes.
    """
    num_rows, radix = batch["input_ids"].shape[1], radix_of(batch)
    rows, has_predictor = share.predictors(radix.predictor_indices, num_rows)
    is_own = has_predictor[radix.prediction_rows]
    missing = int(not has_predictor.any())

    def own(values: Tensor) -> Tensor:
        """Return a number for each prediction of the rank."""
        return pad(values[is_own], (0, missing))

    given = {name: getattr(radix, name) for name in OF_PREDICTIONS}
    return with_radix(
        {**batch, **share.inputs(batch), "shift_labels": own(batch["shift_labels"][0])[None]},
        predictor_indices=pad(rows[has_predictor], (0, missing)),
        prediction_rows=own((has_predictor.cumsum(0) - 1)[radix.prediction_rows]),
        split=num_rows,
        **{name: own(values) for name, values in given.items() if values is not None},
    )
