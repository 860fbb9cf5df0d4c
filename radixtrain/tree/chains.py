"""The calls of cascade: chains of segments attend to themselves, and what hangs on them to prefixes of them, unmasked.

In a `PrefixPlan` the heaviest child of a segment comes right after it. So a run of first children, a *chain*, owns
consecutive rows and is one causal entry. Other children hang on the chain after d of its rows, and all rows below them
see these d rows whole. With m places where something hangs, the chain is cut there, and the first j of the m pieces are
as many blocks as j has bits: all of a power of two are one call, so that the calls are log m and not m.

    chain    [0, 9) with something hanging after 2, 5, 6 rows           j = 1    j = 2    j = 3
    power 1  keys [0, 2), and [5, 6) for what already sees [0, 5)       [0, 2)            [5, 6)
    power 2  keys [0, 5)                                                         [0, 5)   [0, 5)

What hangs on one chain is consecutive, the last place first, so that every block of keys has one range of queries.
Chains below reuse the calls that their rows are not in yet. Every pair of a query and a key that the tree mask allows
is in exactly one call, no call has a query or a key twice, and no row is copied.

A window cannot be applied: a call does not know how far its keys are.

Sources: Hydragen (section 3) and FlashInfer's cascade for a call a level; heavy paths are of Sleator and Tarjan (1983).
`kernels/merge_attention.py` says why the stock backward is exact.

Python integers: calls are made in the DataLoader worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice, pairwise

Entry = tuple[int, int, int, int]  # first query, last + 1, first key, last + 1


def cascade(starts: Sequence[int], parents: Sequence[int], ends: Sequence[int]) -> list[list[Entry]]:
    """Cut a plan into calls. Returns the entries of each, by their first query; the first call is that of the chains.

    starts (S+1), parents (S), ends (S): `segment_starts`, `segment_parents`, `subtree_ends` of the plan.
    """
    chains = _chains(parents)
    calls: list[list[Entry]] = []
    calls_at: dict[int, int] = {}  # the calls, as bits, of the rows that hang on this segment
    for chain in chains:
        places = [segment for segment in chain[:-1] if ends[segment] > ends[segment + 1]]
        used = calls_at.get(parents[chain[0]], 0)
        free = _free_calls(used, len(places).bit_length())
        for number, segment in enumerate(places, 1):
            calls_at[segment] = used | sum(1 << call for power, call in enumerate(free) if number >> power & 1)
        marks = [starts[segment] for segment in (chain[0], *(place + 1 for place in places))]
        for power, call in enumerate(free):
            calls += [[] for _ in range(call + 1 - len(calls))]
            calls[call] += _blocks(places, marks, ends, 1 << power)
    own = [(starts[chain[0]], starts[chain[-1] + 1]) * 2 for chain in chains]
    return [own, *map(sorted, calls)]


def _chains(parents: Sequence[int]) -> list[range]:
    """Return the segments of each chain: a segment that follows its parent goes on with its chain."""
    firsts = [segment for segment, parent in enumerate(parents) if parent < 0 or parent != segment - 1]
    return [range(first, last) for first, last in pairwise([*firsts, len(parents)])]


def _free_calls(used: int, number: int) -> list[int]:
    """Return the first calls that are not among the used ones, which are given as bits."""
    return list(islice((call for call in count() if not used >> call & 1), number))


def _blocks(places: list[int], marks: list[int], ends: Sequence[int], size: int) -> Iterator[Entry]:
    """Yield the blocks of `size` pieces of a chain, each with the rows that see it as a block of this size.

    places: the segments after which something hangs. marks: where the pieces between them start, and the last one ends.
    """
    for left in range(0, len(places) - size + 1, 2 * size):
        first, last = places[left + size - 1], places[min(left + 2 * size - 1, len(places)) - 1]
        yield ends[last + 1], ends[first], marks[left], marks[left + size]
