"""What a layer costs on a batch, in seconds, strategy by strategy: what `auto` is chosen by.

    seconds = U row_flops flop + calls call + rectangles N rectangle + pairs N H pair + elements element

with the rates of a machine, which `radixtrain/hf/calibration.py` measures, and the work of a plan, counted here:

- calls: of the attention kernel;
- rectangles: of queries and keys that they compute, N query heads each;
- pairs: of a query and a key in them, the hidden ones that a kernel computes included;
- elements: of the rows that are gathered, merged or added up, H to a head.

A branch that is not taken costs rows (`min_shared_tokens`), one that is taken costs calls and elements. Which is
cheaper depends on the machine and on the width of the model, so it is not a constant.

Plain numbers, NumPy: it goes into DataLoader workers with the collator that asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixtrain.kernels.cascade import cascade_bounds
from radixtrain.kernels.rectangles import LONG, STRIP
from radixtrain.tree.plan import PrefixPlan

__all__ = ["CHOICES", "MIN_SHARED_TOKENS", "AttentionWork", "Choice", "Rates", "StepCost", "attention_work"]

CHOICES = ("cascade", "path", "expand")  # a batch carries its choice as a place in this list
MIN_SHARED_TOKENS = (1, 4, 16, 64)  # that are tried

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionWork:
    """What a strategy does for a plan, for one head of either kind.

    query_rows, key_rows: rows that are gathered, merged or added up, of the query side, and of keys and of values.
    """

    calls: int
    rectangles: int
    pairs: int
    query_rows: int
    key_rows: int


@dataclass(frozen=True)
class Rates:
    """Seconds of forward and backward together, each at least 0.

    call: of the kernel. rectangle: a head. pair: a head and a column of it. element: moved. flop: of a matrix product.
    """

    call: float
    rectangle: float
    pair: float
    element: float
    flop: float


@dataclass(frozen=True)
class Choice:
    """What `auto` came to for a batch."""

    strategy: str
    min_shared_tokens: int
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """The cost of one layer of a model on a machine.

    on_host: whether attention runs in blocks on the CPU or in packed calls on a device.
    row_flops: floating-point operations of the layer's matrices on one row, forward and backward.
    strategies: to choose from.
    """

    rates: Rates
    on_host: bool
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    row_flops: float
    strategies: tuple[str, ...] = CHOICES

    def seconds(self, plan: PrefixPlan, strategy: str) -> float:
        """Of forward and backward, in seconds. strategy: one of `CHOICES`."""
        work = attention_work(plan, strategy, self.on_host)
        elements = self.elements(work)
        rates, heads = self.rates, self.num_heads
        attention = work.calls * rates.call + work.rectangles * heads * rates.rectangle
        attention += work.pairs * heads * self.head_dim * rates.pair + elements * rates.element
        return attention + plan.num_rows * self.row_flops * rates.flop

    def elements(self, work: AttentionWork) -> int:
        return (work.query_rows * self.num_heads + 2 * work.key_rows * self.num_key_value_heads) * self.head_dim

    def cheapest(self, plan_of: Callable[[int], PrefixPlan], max_rows: int | None = None) -> tuple[Choice, PrefixPlan]:
        """The cheapest strategy and `min_shared_tokens`, with its plan.

        plan_of: the plan of the batch by `min_shared_tokens`. Asked only where a branch point saves less than that.
        max_rows: plans of more rows are left out, but for the one with the fewest.
        """
        least = plan_of(1)
        savings = _smallest_saving(least)
        plans = {1: least, **{tokens: plan_of(tokens) for tokens in MIN_SHARED_TOKENS[1:] if savings < tokens}}
        if max_rows is not None:
            plans = {tokens: plan for tokens, plan in plans.items() if plan.num_rows <= max_rows or tokens == 1}
        choices = [
            Choice(strategy, tokens, self.seconds(plan, strategy))
            for tokens, plan in plans.items()
            for strategy in self.strategies
        ]
        best = min(choices, key=lambda choice: choice.seconds)
        return best, plans[best.min_shared_tokens]


def attention_work(plan: PrefixPlan, strategy: str, on_host: bool) -> AttentionWork:
    """Count what a strategy does. On the host as `TreeLayout` cuts it into blocks, on a device as it packs it."""
    return _COUNTS[strategy](plan, on_host)


def _cascade(plan: PrefixPlan, on_host: bool) -> AttentionWork:
    if on_host:
        rows, behind = cascade_bounds(plan.segment_starts.tolist(), plan.subtree_ends.tolist())
        own = np.diff(rows)
        above = np.array(behind, dtype=np.int64).reshape(-1, 4)
        q_lengths, k_lengths = above[:, 1] - above[:, 0], above[:, 3] - above[:, 2]
        num_calls = len(behind)
    else:
        own = np.diff(plan.segment_starts)
        ends = plan.segment_starts[1:]
        branching = plan.subtree_ends > ends
        q_lengths, k_lengths = (plan.subtree_ends - ends)[branching], own[branching]
        num_calls = max(plan.depth - 1, 0)
    calls, rectangles, pairs = _causal_call(own, own, on_host)
    pairs += int((q_lengths * k_lengths).sum())
    moved = int(q_lengths.sum()), int(k_lengths.sum())
    return AttentionWork(calls + num_calls, rectangles + len(q_lengths), pairs, *moved)


def _path(plan: PrefixPlan, on_host: bool) -> AttentionWork:
    new, path = np.diff(plan.path_cu_seqlens_q), np.diff(plan.path_cu_seqlens_k)
    return AttentionWork(*_causal_call(new, path, on_host), 0, int(path.sum()))


def _expand(plan: PrefixPlan, on_host: bool) -> AttentionWork:
    lengths = np.diff(plan.cu_seqlens)
    calls, rectangles, pairs = _causal_call(lengths, lengths, on_host)
    return AttentionWork(calls, rectangles, pairs, plan.num_tokens + plan.num_rows, plan.num_tokens)


_COUNTS: Mapping[str, Callable[..., AttentionWork]] = {"cascade": _cascade, "path": _path, "expand": _expand}


def _causal_call(q_lengths: IntArray, k_lengths: IntArray, on_host: bool) -> tuple[int, int, int]:
    """Calls, rectangles and pairs."""
    return _on_host(q_lengths, k_lengths) if on_host else _on_device(q_lengths, k_lengths)


def _on_device(q_lengths: IntArray, k_lengths: IntArray) -> tuple[int, int, int]:
    """Calls, rectangles and pairs of one packed causal call, whose kernel leaves hidden pairs out."""
    pairs = q_lengths * (k_lengths - q_lengths) + q_lengths * (q_lengths + 1) // 2
    return 1, len(q_lengths), int(pairs.sum())


def _on_host(q_lengths: IntArray, k_lengths: IntArray) -> tuple[int, int, int]:
    """The same as strips of a causal call (`kernels/rectangles.py`): equal ones equally far apart are one call."""
    is_long = (q_lengths == k_lengths) & (q_lengths >= LONG)
    long = q_lengths[is_long]
    if len(long):  # one call each, whose kernel leaves out most of what it would hide
        calls, rectangles, pairs = _on_host(np.where(is_long, 0, q_lengths), np.where(is_long, 0, k_lengths))
        return calls + len(long), rectangles + len(long), pairs + int((long * (long + 768) // 2).sum())
    filled = q_lengths > 0
    ends, q_lengths, k_lengths = np.cumsum(q_lengths)[filled], q_lengths[filled], k_lengths[filled]
    number = -(-q_lengths // STRIP)
    entry = np.arange(len(number)).repeat(number)
    place = np.arange(len(entry)) - (np.cumsum(number) - number)[entry]
    starts, stops = (q_lengths[entry] * at // number[entry] for at in (place, place + 1))
    heights, widths = stops - starts, (k_lengths - q_lengths)[entry] + stops
    first_queries = (ends - q_lengths)[entry] + starts
    order = np.lexsort((first_queries, heights, widths))
    same = (np.diff(widths[order]) == 0) & (np.diff(heights[order]) == 0)
    steps = np.diff(first_queries[order])
    uneven = same[1:] & same[:-1] & (steps[1:] != steps[:-1])
    num_calls = int((~same).sum() + uneven.sum()) + min(len(entry), 1)
    return num_calls, len(entry), int((heights * widths).sum())


def _smallest_saving(plan: PrefixPlan) -> int:
    """Tokens that the least of the branch points saves: its run times its further children."""
    children = np.bincount(plan.segment_parents[plan.segment_parents >= 0], minlength=plan.num_segments)
    lengths = np.diff(plan.segment_starts)
    saved = lengths * np.maximum(children - 1, 1)
    return int(saved[children > 0].min(initial=np.iinfo(np.int64).max))
