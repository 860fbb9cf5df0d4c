"""The order of an epoch in which sequences with a common beginning meet in a batch, and what r such an order reaches.

A batch of a plain shuffle holds a few sequences of every prompt, and computes every prompt. Here it holds up to
`together` sequences of each of fewer prompts:

    plain shuffle    a c b d | c a d b | b d a c | ...
    together = 2     c c a a | b b d d | a a c c | ...

Every epoch draws anew which sequences of a prompt meet, and which prompts. Each sequence comes once in an epoch, and
is as likely in one full batch as in another, so the expected gradient of a step is that of a plain shuffle. Its
variance is higher, because sequences of one prompt are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from radixtrain.collators.batching import cut_step
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import PrefixGroups

__all__ = ["GroupedOrder", "batches_of", "ratio_of_batches"]

Items = Callable[[int], Sequence[IntArray]]
"""The sequences of an item, by its index. Items are drawn whole."""
ENOUGH = 0.8
"""The part of the largest r that a choice of `together` has to reach."""
ITEMS_READ = 2048
"""Items that an estimate of r reads."""


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
        """With the smallest `together` that reaches `ENOUGH` of the r of the largest, see `_enough_together`."""
        return cls(groups, batch_size, _enough_together(groups, batch_size, seed))

    def draw(self, indices: IntArray, generator: np.random.Generator) -> IntArray:
        """The items of an epoch in the order in which they are cut into batches.

        indices: of the items, (m,), int64. An index may be missing or come several times.

        If no two items share anything, this is `generator.permutation(indices)`.
        """
        shuffled: IntArray = generator.permutation(indices)
        if self.together == 1 or not len(self.groups):
            return shuffled
        whole, parts = self._runs(shuffled, generator)
        return _arranged(whole, parts, self.batch_size, generator)

    def _runs(self, shuffled: IntArray, generator: np.random.Generator) -> tuple[IntArray, list[list[int]]]:
        """Runs of `together` items of one group, (F, together), and shorter runs of what is left of each group."""
        groups, size = self.groups, self.together
        group_of = groups.group_of[shuffled]
        by_group = np.argsort(group_of, kind="stable")
        items, group_of = shuffled[by_group], group_of[by_group]
        bounds = np.searchsorted(group_of, np.arange(len(groups) + 2))
        num_whole = (bounds[1:] - bounds[:-1]) // size * size
        num_whole[0] = 0  # the items of group 0 have nothing more in common than all items
        is_whole = np.arange(len(items)) - bounds[group_of] < num_whole[group_of]
        joined, parts = _join(items[~is_whole], group_of[~is_whole], groups.parent, size, generator)
        return np.concatenate([items[is_whole].reshape(-1, size), joined]), parts


def _join(
    items: IntArray, group_of: IntArray, parent: IntArray, size: int, generator: np.random.Generator
) -> tuple[IntArray, list[list[int]]]:
    """Runs of `size` items, (F, size), and shorter ones, from what the groups have left, deepest groups first.

    What remains of the groups inside a group is joined there. A run is not split, as its items share more with each
    other than with those of another.
    """
    bounds = np.searchsorted(group_of, np.arange(len(parent) + 1)).tolist()
    listed, above = items.tolist(), parent.tolist()
    waiting: dict[int, list[list[int]]] = {}
    whole: list[list[int]] = []
    for group in range(len(parent) - 1, 0, -1):
        runs = waiting.pop(group, [])
        if bounds[group] < bounds[group + 1]:
            runs.append(listed[bounds[group] : bounds[group + 1]])
        if len(runs) > 1:
            runs = _filled([runs[place] for place in generator.permutation(len(runs))], size)
        whole += [run for run in runs if len(run) == size]
        waiting.setdefault(above[group], []).extend(run for run in runs if len(run) < size)
    single = [[item] for item in listed[: bounds[1]]]
    return np.array(whole, dtype=np.int64).reshape(-1, size), single + waiting.pop(0, [])


def _filled(runs: list[list[int]], size: int) -> list[list[int]]:
    """The runs, one after the other joined as long as no more than `size` items are in one."""
    joined = [list(runs[0])]
    for run in runs[1:]:
        if len(joined[-1]) + len(run) <= size:
            joined[-1] += run
        else:
            joined.append(list(run))
    return joined


def _arranged(whole: IntArray, parts: list[list[int]], batch_size: int, generator: np.random.Generator) -> IntArray:
    """All items: whole runs at places where no batch ends inside one, parts in a row at the other places.

    whole: (F, size). A batch has places for `batch_size // size` of them. Those that get no place are parts.
    """
    size = whole.shape[1]
    num_items = whole.size + sum(map(len, parts))
    whole = generator.permutation(whole)
    starts = np.arange(0, num_items, batch_size)[:, None] + size * np.arange(batch_size // size)
    places = generator.permutation(starts[starts + size <= num_items])[: len(whole)]
    parts = parts + whole[len(places) :].tolist()
    order = np.empty(num_items, dtype=np.int64)
    is_part = np.ones(num_items, dtype=bool)
    covered = places[:, None] + np.arange(size)
    order[covered] = whole[: len(places)]
    is_part[covered] = False
    order[is_part] = [item for place in generator.permutation(len(parts)) for item in parts[place]]
    return order


def _enough_together(groups: PrefixGroups, batch_size: int, seed: int) -> int:
    """The smallest of 1, ..., batch_size / 4, batch_size / 2 with which r is at least `ENOUGH` of the largest r.

    No more than half of a batch, so that it holds two prompts or more.
    """
    indices = np.arange(len(groups.group_of))

    def num_unique(together: int) -> int:
        order = GroupedOrder(groups, batch_size, together).draw(indices, np.random.default_rng([seed, 0]))
        return groups.num_unique_tokens(order, batch_size)

    if not len(groups) or batch_size == 1:
        return 1
    most = num_unique(batch_size) / ENOUGH
    if num_unique(1) <= most:
        return 1
    together = max(2, batch_size // 2)
    while together > 2 and num_unique(together // 2) <= most:
        together //= 2
    return together


def batches_of(order: IntArray, batch_size: int, num_batches: int | None = None) -> list[list[int]]:
    """Some batches of an epoch at equal distances, the first and the last among them; or all, if there are not so many.

    num_batches: None for `ITEMS_READ` items, and 16 batches at least.
    """
    num_batches = num_batches or max(16, ITEMS_READ // batch_size)
    starts = range(0, len(order), batch_size)
    chosen = np.unique(np.linspace(0, len(starts) - 1, min(num_batches, len(starts))).round().astype(np.int64))
    return [order[starts[place] : starts[place] + batch_size].tolist() for place in chosen.tolist()]


def ratio_of_batches(items: Items, batches: Iterable[Sequence[int]], max_tokens: int | None) -> float:
    """r: tokens per computed token of these batches, if each is cut into micro-batches of `max_tokens` unique tokens.

    1.0 without any token. Branches too small to be taken, and padding, are not taken into account.
    """
    num_tokens = num_computed = 0
    for batch in batches:
        sequences = [ids for index in batch for ids in items(index) if len(ids)]
        num_tokens += sum(map(len, sequences))
        whole = cut_step(sequences, max_tokens)
        if len(whole.groups) == 1:
            num_computed += whole.num_unique_tokens
        else:
            parts = ([sequences[index] for index in group] for group in whole.groups)
            num_computed += sum(cut_step(part, None).num_unique_tokens for part in parts)
    return num_tokens / num_computed if num_computed else 1.0
