"""A micro-batch -> the part that one of n ranks computes.

The first rank has the first ceil(U / n) rows, and so on. The last ones are filled up by copies of the first row, which
reach nothing, so that every rank has as many rows. Experts that copies are routed to are reached anyway.

Data parallel computes a prefix on every rank that has a sequence of it; a group of `sp_size` ranks computes it once and
sends rows and heads around attention (`hf/sequence_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixtrain.tree.radix_inputs import radix_of, with_radix

OF_ROWS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}  # entries by rows, and the dimension of the rows
OF_PREDICTIONS = ("loss_weights", "label_indices")  # a number for each prediction


def rows_per_rank(num_rows: int, size: int) -> int:
    """Return ceil(U / size), the same on every rank."""
    return -(-num_rows // size)


def own_rows(rows: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Return the rows of one of `size` ranks, filled up with copies of the first: U of `dim` -> ceil(U / size)."""
    count = rows_per_rank(rows.shape[dim], size)
    start = min(rank * count, rows.shape[dim])
    return filled(rows.narrow(dim, start, min(count, rows.shape[dim] - start)), rows.narrow(dim, 0, 1), dim, count)


def filled(rows: Tensor, first: Tensor, dim: int, count: int) -> Tensor:
    """Return `count` rows along `dim`: these, then copies of `first`, which has one."""
    missing = count - rows.shape[dim]
    return torch.cat([rows, *[first] * missing], dim) if missing else rows


def own_inputs(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Tensor]:
    """Return the entries of a batch that have a place for each row, for the rows of one of `size` ranks."""
    found = {name: dim for name, dim in OF_ROWS.items() if batch.get(name) is not None}
    return {name: own_rows(batch[name], dim, rank, size) for name, dim in found.items()}


def own_predictors(predictor_indices: Tensor, num_rows: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the place of each predictor among the rows of the rank, int64, and whether it is one of them, bool.

    predictor_indices: of `num_rows` rows.
    """
    count = rows_per_rank(num_rows, size)
    rows = predictor_indices - rank * count
    return rows, (rows >= 0) & (rows < count)


def split_batch(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the part of one of `size` ranks. batch: of a `RadixCollator` with `merge_labels`.

    The layout stays that of all rows. A rank without predictions gets one of weight 0, so that it runs the same passes.
    """
    num_rows, radix = batch["input_ids"].shape[1], radix_of(batch)
    rows, is_own = own_predictors(radix.predictor_indices, num_rows, rank, size)
    is_kept = is_own[radix.prediction_rows]
    missing = int(not is_own.any())
    given = {name: getattr(radix, name) for name in OF_PREDICTIONS}
    own = {**own_inputs(batch, rank, size), "shift_labels": pad(batch["shift_labels"][:, is_kept], (0, missing))}
    kept = {name: pad(each[is_kept], (0, missing)) for name, each in given.items() if each is not None}
    return with_radix(
        {**batch, **own},
        predictor_indices=pad(rows[is_own], (0, missing)),
        prediction_rows=pad((is_own.cumsum(0) - 1)[radix.prediction_rows[is_kept]], (0, missing)),
        split=num_rows,
        **kept,
    )
