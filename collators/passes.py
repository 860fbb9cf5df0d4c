"""The passes of an optimizer step that computes each shared prefix once, and a long sequence in several pieces.

A cut between two micro-batches goes through what the sequences on both sides of it share. The rows of that prefix are
*kept*: they run first, in a pass of their own, and leave their keys and values to the micro-batches that continue them,
which compute only their new rows, forward and backward. The kept pass goes backward last, with the gradients that they
have added up (`radixtrain/hf/pass_cache.py`).

    sequences   p p p 1 1 | p p p 2 2       p p p    forward
                                            1 1      forward, backward
                                            2 2      forward, backward
                                            p p p    backward; forward again before that, unless its graph was held

A kept prefix may continue another one, and one of more than `max_tokens` rows is several passes. So is the beginning of
a sequence that is too long for one micro-batch.

Integers in sorted order, as in `batching.py`: every rank finds the passes of all ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.cost_model import StepCost
from radixtrain.tree.sorting import SortedSequences

CALLS_OF_A_PASS = 8  # kernel calls in a layer that take as long as a pass does beside its rows
LEAST_GAIN = 0.03  # of the predicted time of a step
FORWARD = 1 / 3  # of forward and backward


class Cost(Protocol):
    """The cost of sequences of these lengths, such as a `SequenceCost`."""

    def __call__(self, lengths: IntArray) -> IntArray: ...


class Span(NamedTuple):
    """The tokens [start, end) of a sequence, by its index in the step."""

    sequence: int
    start: int
    end: int


class Event(NamedTuple):
    """What runs next: a kept pass or a micro-batch, by its place. trains: backward too; otherwise only forward."""

    is_kept: bool
    place: int
    trains: bool


@dataclass
class Schedule:
    """The passes of one rank.

    kept: what each pass that others continue computes. groups: micro-batches of sequences, by index.
    num_kept: of each sequence, how many tokens are kept when its micro-batch runs.
    order: a kept pass is in it twice. holds_graph: whether the graph of a kept pass is held from its first time to its
        second; otherwise it runs again. num_rows: new rows of all passes, each counted once.
    cost: predicted, in the unit of the `SequenceCost`.
    """

    holds_graph: bool = False
    kept: list[Span] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    num_kept: dict[int, int] = field(default_factory=dict)
    order: list[Event] = field(default_factory=list)
    num_rows: int = 0
    cost: int = 0


def aligned(orders: Sequence[Sequence[Event]], rank: int) -> Iterator[tuple[Event | None, bool]]:
    """Yield what a rank runs if all ranks run forward passes and training passes at the same time, as FSDP needs it.

    Yields (the event, or None for a pass of weight zero, whether it trains).
    """
    places = [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        following = [order[place] if place < len(order) else None for place, order in zip(places, orders, strict=True)]
        trains = all(event is None or event.trains for event in following)
        runs = [event is not None and event.trains == trains for event in following]
        yield following[rank] if runs[rank] else None, trains
        places = [place + run for place, run in zip(places, runs, strict=True)]


@dataclass(frozen=True)
class Keeping:
    """When prefixes are kept.

    least_rows: fewest rows of a kept prefix beyond those that are kept already; None keeps only what a sequence of more
        than `max_tokens` needs.
    pass_rows: rows that cost as much as a pass does beside its rows.
    least_gain: share of the predicted time that it has to save. A sequence of more than `max_tokens` is always cut.
    holds_graph: whether the graphs of kept passes are held; `auto`: if they and what runs meanwhile are at most
        `max_tokens` rows together, and no dearer.
    """

    least_rows: int | None
    pass_rows: int
    least_gain: float
    holds_graph: bool | str

    @classmethod
    def of(cls, wanted: bool | str, step_cost: StepCost | None, holds_graph: bool | str) -> Keeping | None:
        """Choose when to keep. wanted: `auto` if it pays by a layer's cost, if known; True always; False never."""
        if wanted != "auto":
            return cls(1, 0, -math.inf, holds_graph) if wanted else None
        if step_cost is None:
            return cls(None, 0, LEAST_GAIN, holds_graph)
        pass_rows = round(CALLS_OF_A_PASS * step_cost.rates.call / step_cost.row_seconds)
        return cls(max(2 * pass_rows, 1), pass_rows, LEAST_GAIN, holds_graph)

    def schedule(self, by_order: SortedSequences, max_tokens: int | None, cost: Cost) -> Schedule:
        """Return the cheapest schedule: with only the prefixes that a long sequence needs, or all that may pay."""
        is_held = self.holds_graph is True
        needed = self._schedule(by_order, cost, _parts(by_order, max_tokens, None), is_held)
        if len(needed.groups) < 2 or self.least_rows is None:
            return needed
        best = self._schedule(by_order, cost, _parts(by_order, max_tokens, self.least_rows), is_held)
        within = _parts(by_order, max_tokens, self.least_rows, counts_held=True) if self.holds_graph == "auto" else []
        if within:
            best = min(self._schedule(by_order, cost, within, True), best, key=lambda schedule: schedule.cost)
        return best if best.cost <= (1 - self.least_gain) * needed.cost else needed

    def _schedule(self, by_order: SortedSequences, cost: Cost, parts: list[_Part], holds_graph: bool) -> Schedule:
        found = Schedule(holds_graph)
        ends = [part.end for part in parts]
        open_until: list[tuple[int, int]] = []  # the last part that reads a kept pass, and that pass
        for index, part in enumerate(parts):
            for kept, last_place in part.kept:
                open_until.append((bisect_right(ends, last_place), len(found.kept)))
                found.order.append(Event(True, len(found.kept), trains=False))
                found.kept.append(kept)
                found.num_rows += kept.end - kept.start
            members = by_order.order[part.start : part.end].tolist()
            found.num_kept |= dict(zip(members, part.num_kept, strict=True))
            found.num_rows += part.num_rows
            if part.num_rows:
                found.order.append(Event(False, len(found.groups), trains=True))
                found.groups.append(members)
            done = [number for last, number in open_until if last == index]
            found.order += [Event(True, number, trains=True) for number in reversed(done)]
        found.cost = self._cost(parts, by_order, found, cost)
        return found

    def _cost(self, parts: list[_Part], by_order: SortedSequences, found: Schedule, cost: Cost) -> int:
        shared = by_order.lcp.copy()
        for part in parts:
            shared[part.start] = part.num_before
        of_sequences = cost(by_order.lengths).sum() - cost(shared).sum()
        starts, ends = (np.array([kept[side] for kept in found.kept], dtype=np.int64) for side in (1, 2))
        of_kept = cost(ends).sum() - cost(starts).sum()
        overhead = len(found.order) * cost(np.array([self.pass_rows]))[0]
        again = 0.0 if found.holds_graph else FORWARD
        return round(of_sequences + again * of_kept + overhead)


class _Part(NamedTuple):
    """A micro-batch as places in the sorted order, [start, end).

    num_rows: new ones. num_before: tokens of its first sequence that were kept for an earlier one.
    num_kept: of each sequence, all that are kept. kept: what is kept from here on, each with the last place to read it.
    """

    start: int
    end: int
    num_rows: int
    num_before: int
    num_kept: list[int]
    kept: list[tuple[Span, int]]


def _parts(
    by_order: SortedSequences, max_tokens: int | None, least_rows: int | None, counts_held: bool = False
) -> list[_Part]:
    """Cut full micro-batches, as many sequences in each as fit with the prefix that is kept at its end.

    least_rows: as in `Keeping`; None keeps only what a sequence of more than `max_tokens` has to keep.
    counts_held: the rows that are kept meanwhile count too; nothing is returned if a sequence does not fit beside them.
    """
    lengths, lcp, order = by_order.lengths.tolist(), [*by_order.lcp.tolist(), 0], by_order.order.tolist()
    most = sum(lengths) if max_tokens is None else max_tokens
    parts, start, num_kept = list[_Part](), 0, 0
    while start < len(lengths):
        held = sum(x.end - x.start for part in parts for x, last in part.kept if last >= start) if counts_held else 0
        end, num_rows, at_end = _end_of_part(lengths, lcp, start, num_kept, most - held, least_rows, counts_held)
        reached = min([num_kept, *lcp[start + 1 : end + 1]])
        if counts_held and num_rows + at_end - reached > most - held:
            return []
        kept, inside = list[tuple[Span, int]](), num_kept
        if at_end > reached:
            kept += _kept_passes(order[end - 1], end - 1, reached, at_end, most, lcp)
        if num_rows > most:  # one sequence, and copies of it: all but its last `most` tokens
            inside = lengths[start] - most
            kept += _kept_passes(order[start], start, max(num_kept, at_end), inside, most, lcp)
            num_rows = most
        parts.append(_Part(start, end, num_rows, num_kept, _num_kept(lcp, start, end, inside, at_end), kept))
        num_kept = max(min([inside, *lcp[start + 1 : end + 1]]), at_end)
        start = end
    return parts


def _end_of_part(
    lengths: list[int],
    lcp: list[int],
    start: int,
    num_kept: int,
    most: int,
    least_rows: int | None,
    counts_held: bool,
) -> tuple[int, int, int]:
    """Return the end of the largest micro-batch from a place, its new rows, and the prefix length kept at its end."""
    found: tuple[int, int, int] | None = None
    rows, reached, longest = 0, num_kept, max(lcp)
    for place in range(start, len(lengths)):
        rows += lengths[place] - (num_kept if place == start else lcp[place])
        if lcp[place + 1] and lcp[place + 1] == lengths[place + 1]:  # a copy brings no row that could continue a prefix
            reached = min(reached, lcp[place + 1])
            continue
        if found is not None and rows - longest > most:
            break
        shared = lcp[place + 1]
        reached = min(reached, shared)
        at_end = shared if least_rows is not None and shared - reached >= least_rows else reached
        num_rows = rows - (at_end - reached)
        if found is None or (rows if counts_held else num_rows) <= most:
            found = place + 1, num_rows, at_end
    assert found is not None
    return found


def _kept_passes(
    sequence: int, place: int, start: int, end: int, most: int, lcp: list[int]
) -> Iterator[tuple[Span, int]]:
    """Yield passes of about equal size over the tokens [start, end), each with the last place that shares its start."""
    number = -(-(end - start) // most)
    for index in range(number):
        first, stop = (start + (end - start) * side // number for side in (index, index + 1))
        last = place
        while lcp[last + 1] > first:
            last += 1
        yield Span(sequence, first, stop), last


def _num_kept(lcp: list[int], start: int, end: int, at_start: int, at_end: int) -> list[int]:
    """Count the tokens of each sequence of a micro-batch that are kept: for the one before it, or the one after it."""
    from_start, from_end = [at_start], [min(at_end, lcp[end])]
    for place in range(start + 1, end):
        from_start.append(min(from_start[-1], lcp[place]))
    for place in range(end - 1, start, -1):
        from_end.append(min(from_end[-1], lcp[place]))
    return [max(pair) for pair in zip(from_start, reversed(from_end), strict=True)]
