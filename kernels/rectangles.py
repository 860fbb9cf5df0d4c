"""A ragged call as the kernels that loop run it: equal rectangles of queries and keys, with masks.

torch's CPU flash kernel computes whole rectangles: below 512 keys its `is_causal` hides half of what it has computed.
So a causal entry is cut into strips of queries, each with the keys that any of its queries sees and a mask for the
corner; a long one is left to the kernel, which then skips most of what it would hide. Rectangles of one shape whose
rows lie equally far apart are one call with a batch axis, as views: nothing is copied, and 16 suffixes of one length
cost one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["LONG", "STRIP", "Bounds", "Cut", "Rectangles", "cut_of"]

STRIP = 64  # queries of a strip: with more of them more is computed and hidden, with fewer there are more calls
# Queries at which `is_causal` is as fast as strips, which take 0.66 of its time at 512, 0.80 at 1024, 0.99 at 2304.
LONG = 1536

Bounds = tuple[int, int, int, int]  # of one entry: q_start, q_end, k_start, k_end


@dataclass(frozen=True, eq=False)
class Rectangles:
    """`number` rectangles of `num_queries` x `num_keys`, the first at `first_query`, `first_key`.

    query_step, key_step: rows from one rectangle to the next.
    mask: None if every query sees every key; (queries, keys) or (number, 1, queries, keys), float32, 0 or -inf.
    causal: without a mask, of as many keys as queries: a query sees no later key.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    mask: Tensor | None = None
    causal: bool = False
    number: int = 1
    query_step: int = 0
    key_step: int = 0

    def queries(self, x: Tensor) -> Tensor:
        """(number, num_queries, ...). A view of the rows of a query-side tensor (T, ...)."""
        return _equal_runs(x, self.number, self.query_step, self.first_query, self.num_queries)

    def keys(self, x: Tensor) -> Tensor:
        """(number, num_keys, ...). A view of the rows of a key-side tensor (J, ...)."""
        return _equal_runs(x, self.number, self.key_step, self.first_key, self.num_keys)


@dataclass(frozen=True, eq=False)
class Cut:
    """A call, cut into rectangles.

    parts: no query is in two.
    num_queries: queries covered by some part; the rest see no key.
    keys_meet: whether a key may be in two parts, so that its gradients have to be added.
    """

    parts: tuple[Rectangles, ...]
    num_queries: int
    keys_meet: bool


def cut_of(
    bounds: Sequence[Bounds], masks: Sequence[Tensor | None], causal: bool, window: int | None, device: torch.device
) -> Cut:
    """Cut the entries of a call; arguments as in `Ragged`."""
    filled = [(*entry, mask) for entry, mask in zip(bounds, masks, strict=True) if _has_pairs(*entry)]
    masked = [Rectangles(q0, q1 - q0, k0, k1 - k0, mask) for q0, q1, k0, k1, mask in filled if mask is not None]
    plain = [Rectangles(q0, q1 - q0, k0, k1 - k0) for q0, q1, k0, k1, mask in filled if mask is None]
    strips = [strip for entry in plain for strip in _strips(entry, window)] if causal else plain
    parts = list(_batched(strips))
    if causal:
        parts = _with_corners(parts, window, device)
    parts += _batched(masked)
    num_queries = sum(part.number * part.num_queries for part in parts)
    return Cut(tuple(parts), num_queries, len(strips) > len(plain))


def _has_pairs(q0: int, q1: int, k0: int, k1: int) -> bool:
    return q1 > q0 and k1 > k0


def _strips(entry: Rectangles, window: int | None) -> Iterator[Rectangles]:
    """A causal entry in strips of about equal height, each with the keys that its queries see; a long one as it is.

    Queries that come before the first key see none, and are left out.
    """
    if window is None and entry.num_queries == entry.num_keys >= LONG:
        yield replace(entry, causal=True)
        return
    num_queries, num_keys = min(entry.num_queries, entry.num_keys), entry.num_keys
    first_query = entry.first_query + entry.num_queries - num_queries
    number = -(-num_queries // STRIP)
    cuts = [num_queries * n // number for n in range(number + 1)]
    for start, stop in pairwise(cuts):
        last_key = num_keys - (num_queries - stop)
        first_key = 0 if window is None else max(0, last_key - (stop - start) - window + 1)
        yield Rectangles(first_query + start, stop - start, entry.first_key + first_key, last_key - first_key)


def _batched(parts: list[Rectangles]) -> Iterator[Rectangles]:
    """Joins single rectangles of one shape whose rows lie equally far apart."""
    by_shape = sorted(parts, key=lambda part: (part.num_keys, part.num_queries))  # stable: rows stay in order
    run: list[Rectangles] = []
    for part in by_shape:
        if run and not _goes_on(run, part):
            yield _joined(run)
            run = []
        run.append(part)
    if run:
        yield _joined(run)


def _goes_on(run: list[Rectangles], part: Rectangles) -> bool:
    last = run[-1]
    if part.causal or (last.num_keys, last.num_queries) != (part.num_keys, part.num_queries):
        return False  # a long one keeps the cores busy by itself, and the eager kernel writes its scores out
    steps = part.first_query - last.first_query, part.first_key - last.first_key
    return min(steps) >= 0 and (len(run) == 1 or steps == _steps(run))


def _steps(run: list[Rectangles]) -> tuple[int, int]:
    return run[1].first_query - run[0].first_query, run[1].first_key - run[0].first_key


def _joined(run: list[Rectangles]) -> Rectangles:
    if len(run) == 1:
        return run[0]
    masks = [part.mask for part in run if part.mask is not None]
    query_step, key_step = _steps(run)
    mask = torch.stack(masks)[:, None] if masks else None
    return replace(run[0], mask=mask, number=len(run), query_step=query_step, key_step=key_step)


def _with_corners(parts: list[Rectangles], window: int | None, device: torch.device) -> list[Rectangles]:
    """Gives the parts causal masks, which are views of one mask: they agree from the bottom right corner on."""
    cut = [part for part in parts if not part.causal]
    height = max((part.num_queries for part in cut), default=0)
    width = max((part.num_keys for part in cut), default=0)
    seen = torch.ones(height, width, dtype=torch.bool, device=device).tril(width - height)
    if window is not None:
        seen = seen.triu(width - height - window + 1)
    mask = torch.zeros(height, width, device=device).masked_fill_(~seen, float("-inf"))
    return [
        part if part.causal else replace(part, mask=mask[height - part.num_queries :, width - part.num_keys :])
        for part in parts
    ]


def _equal_runs(x: Tensor, number: int, step: int, first: int, length: int) -> Tensor:
    if number == 1:
        return x[None, first : first + length]
    row = x.stride(0)
    return x.as_strided((number, length, *x.shape[1:]), (step * row, *x.stride()), x.storage_offset() + first * row)
