"""`PrefixGroupedSampler`: the order of an epoch in which rows with a common prompt meet in a batch, and its r.

A batch of a plain shuffle holds a few sequences of every prompt, and computes every prompt. Here it holds up to
`together` sequences of each of fewer prompts:

    plain shuffle    a c b d | c a d b | b d a c | ...
    together = 2     c c a a | b b d d | a a c c | ...

If an optimizer step has several batches, of several ranks or accumulated, whole steps are drawn so. The sequences of
each are then sorted, and so sequences with a common prompt meet in its batches too.

Every epoch draws again which sequences of a prompt meet, and which prompts. Each sequence comes once in an epoch, and
is as likely in one full batch as in another, so the expected gradient of a step is that of a plain shuffle. Its
variance is higher, because sequences of one prompt are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from radixtrain.collators.batching import share_by_unique_tokens
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import PrefixGroups, find_prefix_groups

WHOLE_ROW = "input_ids"
READ_TOGETHER = 1000  # rows of a `datasets.Dataset`: 6 us for each, 40 us if read one by one

Items = Callable[[int], Sequence[IntArray]]
"""The sequences of an item, by its index. Items are drawn whole."""
ENOUGH = 0.8
"""The part of the largest r that a choice of `together` has to reach."""
ITEMS_READ = 2048
"""Items that an estimate of r reads."""


class PrefixGroupedSampler(Sampler[int]):
    """Sample indices of a data set such that `batch_size` consecutive ones share as much as they should.

    data: a data set with a length whose entries have `column`, or a sequence of token sequences.
    batch_size: rows that the trainer collates together: of one micro-batch, on one device.
    together: most rows of a prompt that a batch gets on purpose, best a divisor of `batch_size`. 1 is a plain shuffle;
        `batch_size` shares the most, and most batches then have one prompt. None for the smallest divisor, at most
        half of `batch_size`, with which r is at least 80 % of the largest r; half of it, and at least 2, if none is.
    seed: of the order. Every process needs the same.
    num_batches: batches of an optimizer step, ranks times accumulated batches: those that come one after the other, as
        Accelerate hands them out. `together` is then of a step, up to `num_batches` times `batch_size`, and the rows of
        a step are the same as with batches that are `num_batches` times as large, in sorted order.
    column: the column that holds the tokens, `input_ids` by default. Any other is taken for a part of the row, such as
        `prompt_ids` of a preference pair; what else a row has is not seen, so r is overestimated when `together` is
        chosen.

    Every epoch is another permutation of all rows. The order depends only on the data, the arguments and the epoch,
    which goes up with every pass. `set_epoch` sets it; Accelerate, and so Hugging Face's Trainer, call it.

    Reads all rows once, when it is made. Raises ValueError if the data have no length or no tokens in `column`, if
    `batch_size` or `num_batches` is below 1, and if `together` is not between 1 and the rows of a step.

    >>> sampler = PrefixGroupedSampler(rows, batch_size=2, seed=0)
    >>> loader = DataLoader(rows, batch_size=2, sampler=sampler, collate_fn=RadixCollator())
    >>> sorted(sampler)
    [0, 1]
    """

    def __init__(
        self,
        data: object,
        batch_size: int,
        together: int | None = None,
        seed: int = 0,
        column: str = WHOLE_ROW,
        num_batches: int = 1,
    ):
        for name, number in (("batch_size", batch_size), ("num_batches", num_batches)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        size = batch_size * num_batches
        if together is not None and not 1 <= together <= size:
            rows_of_step = "batch_size" if num_batches == 1 else "batch_size x num_batches"
            raise ValueError(f"together must be from 1 to {rows_of_step} ({size}), got {together}")
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(
                f"PrefixGroupedSampler needs a data set with a length and indices, got {type(data).__name__}; a stream "
                f"is read in the order that it has"
            )
        self.num_rows, self.batch_size, self.seed, self.epoch = len(data), batch_size, seed, 0
        groups = find_prefix_groups(_all_tokens(data, column), copies=column != WHOLE_ROW)
        if together is None:
            self.order = GroupedOrder.choose(groups, size, seed)
        else:
            self.order = GroupedOrder(groups, size, together)

    @property
    def together(self) -> int:
        """Return the most rows of a prompt that a step gets on purpose."""
        return self.order.together

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        """Iterate over the order of this epoch, and go on to the next one."""
        order = self.order.draw(np.arange(self.num_rows), np.random.default_rng([self.seed, self.epoch]))
        self.epoch += 1
        size = self.order.batch_size
        steps = (order[start : start + size] for start in range(0, len(order), size))
        return chain.from_iterable(self._sorted(step).tolist() for step in steps)

    def _sorted(self, step: IntArray) -> IntArray:
        """Sort the rows of a step for its batches. The incomplete step at the end of an epoch is left as it is."""
        if len(step) < self.order.batch_size or len(step) == self.batch_size:
            return step
        return step[self.order.groups.sorted(step).order]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


def _all_tokens(data: Any, column: str) -> Iterator[IntArray]:
    """Yield the tokens of every row."""
    if not hasattr(data, "select_columns") or column not in data.column_names:
        yield from (_tokens(data, column, index) for index in range(len(data)))
        return
    blocks = data.select_columns([column]).with_format("numpy").iter(READ_TOGETHER)
    rows = (values for block in blocks for values in block[column])
    yield from (_as_tokens(values, column, index) for index, values in enumerate(rows))


def _tokens(data: Any, column: str, index: int) -> IntArray:
    """Return the tokens of one row."""
    row = data[index]
    if not isinstance(row, Mapping):
        return _as_tokens(row, column, index)
    if column not in row:
        names = ", ".join(map(str, row))
        raise ValueError(f"row {index} of the data set has no {column!r}; give column=, one of: {names}")
    return _as_tokens(row[column], column, index)


def _as_tokens(values: object, column: str, index: int) -> IntArray:
    tokens = np.asarray(values)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise ValueError(f"row {index} of the data set: expected token ids in {column!r}, got {str(values)[:40]!r}")
    return tokens.astype(np.int64)


@dataclass(frozen=True, eq=False)
class GroupedOrder:
    """Draws the order of an epoch.

    groups: of the items.
    batch_size: items in a batch.
    together: most items of a group that one batch gets on purpose; 1 is a plain shuffle.
    """

    groups: PrefixGroups
    batch_size: int
    together: int

    @classmethod
    def choose(cls, groups: PrefixGroups, batch_size: int, seed: int) -> GroupedOrder:
        """Choose the smallest divisor of `batch_size` with which r is at least `ENOUGH` of the best.

        No more than half of a batch, so that it holds two prompts or more, but 2 in a batch of two. Half of it, rounded
        down, if no such divisor is enough: a prime has none but 1.
        """
        indices = np.arange(len(groups.places))

        def num_unique(together: int) -> int:
            order = cls(groups, batch_size, together).draw(indices, np.random.default_rng([seed, 0]))
            batches = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
            return sum(groups.sorted(batch).num_unique_tokens for batch in batches)

        most = num_unique(batch_size) / ENOUGH
        half = max(2, batch_size // 2)
        sizes = [size for size in range(1, half) if batch_size % size == 0]
        together = next((size for size in sizes if num_unique(size) <= most), half)
        return cls(groups, batch_size, together)

    def draw(self, indices: IntArray, generator: np.random.Generator) -> IntArray:
        """Return the items of an epoch in the order in which they are cut into batches.

        indices: of the items, (m,), int64. An index may be missing or come several times.

        Each group, its deepest branches first, is cut into runs of `together` items. The shorter runs at the ends of
        groups are joined and cut alike. So no batch ends inside a run if `together` divides `batch_size`.
        If no two items share anything, this is `generator.permutation(indices)`.
        """
        shuffled: IntArray = generator.permutation(indices)
        if self.together == 1 or not len(self.groups):
            return shuffled
        items = shuffled[np.argsort(self.groups.branch_of[shuffled], kind="stable")]
        starts = np.flatnonzero(np.diff(self.groups.group_of[items], prepend=-2))
        places = np.arange(len(items)) - starts.repeat(np.diff(starts, append=len(items)))
        runs = np.split(items, np.flatnonzero(places % self.together == 0)[1:])
        whole = [run for run in runs if len(run) == self.together]
        short = [run for run in runs if len(run) < self.together]
        joined = np.concatenate([items[:0], *(short[number] for number in generator.permutation(len(short)))])
        end = len(joined) - len(joined) % self.together
        blocks = np.concatenate([*whole, joined[:end]]).reshape(-1, self.together)
        return np.append(generator.permutation(blocks), joined[end:])


def batches_of(order: IntArray, batch_size: int, num_batches: int | None = None) -> list[list[int]]:
    """Return some batches of an epoch at equal distances, the first and the last included; all, if there are few.

    num_batches: None for `ITEMS_READ` items, and 16 batches at least.
    """
    num_batches = num_batches or max(16, ITEMS_READ // batch_size)
    starts = range(0, len(order), batch_size)
    chosen = np.unique(np.linspace(0, len(starts) - 1, min(num_batches, len(starts))).round().astype(np.int64))
    return [order[starts[place] : starts[place] + batch_size].tolist() for place in chosen.tolist()]


def ratio_of_batches(
    items: Items, batches: Iterable[Sequence[int]], max_tokens: int | None, num_ranks: int = 1
) -> float:
    """Return r, tokens per computed token, of these batches if cut into micro-batches of `max_tokens` unique tokens.

    num_ranks: ranks that divide each batch and compute their shares separately.

    1.0 without any token. Branches too small to be taken and padding are not taken into account, nor is what a token
    costs, by which the ranks of a run may divide differently.
    """
    num_tokens = num_computed = 0
    for batch in batches:
        sequences = [ids for index in batch for ids in items(index) if len(ids)]
        num_tokens += sum(map(len, sequences))
        num_computed += sum(share_by_unique_tokens(sequences, num_ranks, max_tokens).costs)  # a unique token costs 1
    return num_tokens / num_computed if num_computed else 1.0
