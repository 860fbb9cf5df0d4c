"""`PrefixGroupedSampler`: the order of an epoch in which rows with a common prompt meet, for any DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from radixtrain.collators.grouping import GroupedOrder
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import find_prefix_groups

__all__ = ["PrefixGroupedSampler"]

WHOLE_ROW = "input_ids"
READ_TOGETHER = 1000  # rows of a `datasets.Dataset`, which takes 6 us for each of them so, and 40 us one by one


class PrefixGroupedSampler(Sampler[int]):
    """Indices of a data set, one at a time, so that each `batch_size` in a row share as much as they should.

    data: a data set with a length whose entries have `column`, or a sequence of token sequences.
    batch_size: rows that the trainer collates together: of one micro-batch, on one device.
    together: most rows of a prompt that a batch gets on purpose. 1 is a plain shuffle; `batch_size` shares the most,
        and most batches then have one prompt. None for the smallest of 1, ..., `batch_size` / 4, `batch_size` / 2 with
        which r is at least 80 % of the largest r.
    seed: of the order; give every process the same.
    column: that holds the tokens. Another than `input_ids` is taken for a part of the row, such as `prompt_ids` of a
        preference pair; what else a row has is not seen, so r is overestimated when `together` is chosen.

    Every epoch is another permutation of all rows. The order depends only on the data, the arguments and the epoch,
    which goes up with every pass. `set_epoch` sets it; Accelerate, and so Hugging Face's Trainer, call it.

    Reads all rows once, when it is made. Raises ValueError if the data have no length or no tokens in `column`, and if
    `together` is not between 1 and `batch_size`.
    """

    def __init__(self, data: Any, batch_size: int, together: int | None = None, seed: int = 0, column: str = WHOLE_ROW):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if together is not None and not 1 <= together <= batch_size:
            raise ValueError(f"together must be from 1 to batch_size ({batch_size}), got {together}")
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(
                f"PrefixGroupedSampler needs a data set with a length and indices, got {type(data).__name__}; a stream "
                f"is read in the order that it has"
            )
        self.num_rows, self.seed, self.epoch = len(data), seed, 0
        groups = find_prefix_groups(_all_tokens(data, column), copies=column != WHOLE_ROW)
        if together is None:
            self.order = GroupedOrder.choose(groups, batch_size, seed)
        else:
            self.order = GroupedOrder(groups, batch_size, together)

    @property
    def together(self) -> int:
        """Most rows of a prompt that a batch gets on purpose."""
        return self.order.together

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        """The order of this epoch. The next pass has that of the next one."""
        order = self.order.draw(np.arange(self.num_rows), np.random.default_rng([self.seed, self.epoch]))
        self.epoch += 1
        return iter(order.tolist())

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.epoch = epoch


def _all_tokens(data: Any, column: str) -> Iterator[IntArray]:
    """The tokens of every row."""
    if not hasattr(data, "select_columns") or column not in data.column_names:
        yield from (_tokens(data, column, index) for index in range(len(data)))
        return
    blocks = data.select_columns([column]).with_format("numpy").iter(READ_TOGETHER)
    rows = (values for block in blocks for values in block[column])
    yield from (_as_tokens(values, column, index) for index, values in enumerate(rows))


def _tokens(data: Any, column: str, index: int) -> IntArray:
    """The tokens of one row."""
    row = data[index]
    if not isinstance(row, Mapping):
        return _as_tokens(row, column, index)
    if column not in row:
        names = ", ".join(map(str, row))
        raise ValueError(f"row {index} of the data set has no {column!r}; give column=, one of: {names}")
    return _as_tokens(row[column], column, index)


def _as_tokens(values: Any, column: str, index: int) -> IntArray:
    tokens = np.asarray(values)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise ValueError(f"row {index} of the data set: expected token ids in {column!r}, got {str(values)[:40]!r}")
    return tokens.astype(np.int64)
