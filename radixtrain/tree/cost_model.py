"""The predicted seconds of a plan under each strategy, by which `auto` chooses. (Flops: `radixtrain/bench/flops.py`.)

    seconds = U row_flops flop + calls call + rectangles N rectangle + pairs N H pair + elements element

for one layer. In a hybrid model attention counts for the layers that attend, and recurrent layers cost what their
`RunCost` says of their calls, rows and states. The rates are `FIXED_RATES`, the same on every machine; the work of a
plan is counted here:

- calls: of the attention kernel;
- rectangles: of queries and keys that they compute, N query heads each;
- pairs: of a query and a key in them, with the hidden ones that a kernel computes;
- elements: of the rows that are gathered, merged or added up, H to a head.

Leaving a branch out costs rows (`min_shared_tokens`); keeping it costs calls and elements, and perhaps a
fork in a recurrent layer. Which is cheaper depends on the machine and on the width of the model, so it is not a
constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from radixtrain.kernels.cpu_loops import LONG, STRIP
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.chains import cascade
from radixtrain.tree.layout import GROUP
from radixtrain.tree.plan import PrefixPlan
from radixtrain.tree.runs import RunCost, cost_of_runs

CHOICES = ("cascade", "path", "expand")  # a batch carries its choice as an index into this tuple
CANDIDATES = (1, 4, 16, 64)  # values of `min_shared_tokens` that are tried


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """What a strategy does for a plan, in one head.

    query_rows, key_rows: rows that are gathered, merged or added up: of query heads, and of each of keys and values.
    """

    calls: int
    rectangles: int
    pairs: int
    query_rows: int = 0
    key_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of forward and backward together, each at least 0.

    call: of the kernel.
    rectangle: in one head.
    pair: in one column of one head.
    element: that is moved.
    flop: of a matrix product.
    sent_byte: from one rank to another on the same machine. exchange: of a layer beyond its rows and these bytes, if
        ranks split a micro-batch.
    runs: of a recurrent layer; None if the model has none.
    """

    call: float
    rectangle: float
    pair: float
    element: float
    flop: float
    sent_byte: float = 0.0
    exchange: float = 0.0
    runs: RunCost | None = None


# Of a CPU: in the middle of what `radixtrain/hf/step_cost.py` measured with 1 and 2 threads and hidden sizes of 64 to
# 1024 (2026-11-23, Xeon with AVX-512); of 90 batches, real and generated, they choose 84 as the measured ones do. Two
# ranks send 1.1 to 1.9 GB/s each over gloo (2026-11-24, 0.5 to 32 MiB), and `exchange` is what
# `recipes/benchmarks/2026-11-24-split.md` leaves for a layer. Of a GPU, by arithmetic and not measured: an H100, 14
# operations of a pair and column at 280 TFLOP/s, 36 bytes moved for an element (in float32, forward and backward) at
# 2.4 TB/s, products with what runs between them at 250 TFLOP/s.
FIXED_RATES = {
    "cpu": Rates(call=2e-4, rectangle=5e-6, pair=2e-10, element=2.5e-9, flop=8e-12, sent_byte=6e-10, exchange=5e-3),
    "cuda": Rates(call=1e-4, rectangle=0.0, pair=5e-14, element=1.5e-11, flop=4e-15, sent_byte=1e-11, exchange=2e-4),
}


@dataclass(frozen=True)
class Choice:
    """What `auto` chose for a batch, and the seconds that the cost model predicts for it."""

    strategy: str
    min_shared_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of one layer of a model on a machine, averaged if the layers differ.

    on_host: True if attention runs in rectangles on the CPU, False if in packed calls on a device.
    num_heads, num_key_value_heads, head_dim: of the attention, as its kernel runs it.
    row_flops: floating-point operations of the layer's matrices on one row, forward and backward. The rest of a
        recurrent layer is in its `RunCost`.
    strategies: to choose from.
    attention_share, mixer_share: layers that attend, and those with a recurrent state, over all layers.
    """

    rates: Rates
    on_host: bool
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    row_flops: float
    strategies: tuple[str, ...] = CHOICES
    attention_share: float = 1.0
    mixer_share: float = 0.0

    @property
    def run_cost(self) -> RunCost | None:
        """Return what the recurrent layers cost; None if there are none."""
        return self.rates.runs if self.mixer_share else None

    @property
    def row_seconds(self) -> float:
        """Return the seconds of a row of a long sequence, without attention."""
        runs = self.run_cost
        in_mixer = 0.0 if runs is None else self.mixer_share * runs.row
        return self.row_flops * self.rates.flop + in_mixer

    def sent_numbers(self, sp_size: int) -> float:
        """Count the numbers that a rank sends per row, forward and backward, if `sp_size` ranks split a micro-batch.

        Queries, keys and values to the ranks that have their heads, and the output back; and once more the gradients.
        """
        own = self.of_rank(sp_size)
        numbers = 2 * (own.num_heads + own.num_key_value_heads) * self.head_dim
        return self.attention_share * 2 * numbers * (sp_size - 1)

    def of_rank(self, sp_size: int) -> StepCost:
        """Return the cost of a layer in one of `sp_size` ranks that split its heads; too few key heads are copied."""
        copies = sp_size // math.gcd(sp_size, self.num_key_value_heads)
        key_heads = self.num_key_value_heads * copies // sp_size
        return replace(self, num_heads=self.num_heads // sp_size, num_key_value_heads=key_heads)

    def seconds(self, plan: PrefixPlan, strategy: str) -> float:
        """Predict the seconds of forward and backward. strategy: one of `CHOICES`."""
        return self.attention_seconds(plan, strategy) + self.run_seconds(plan) + self._matrix_seconds(plan)

    def attention_seconds(self, plan: PrefixPlan, strategy: str) -> float:
        """Predict the seconds of attention, forward and backward."""
        work = attention_work(plan, strategy, self.on_host)
        rates, (calls, rectangles, pairs, elements) = self.rates, self.counts(work)
        attention = calls * rates.call + rectangles * rates.rectangle + pairs * rates.pair + elements * rates.element
        return self.attention_share * attention

    def run_seconds(self, plan: PrefixPlan) -> float:
        """Predict the seconds of the mixers of recurrent layers, with the forks that cost least; 0 without any."""
        if self.run_cost is None:
            return 0.0
        return self.mixer_share * cost_of_runs(plan.segment_starts, plan.segment_parents, self.run_cost)

    def _matrix_seconds(self, plan: PrefixPlan) -> float:
        return plan.num_rows * self.row_flops * self.rates.flop

    def counts(self, work: AttentionWork) -> tuple[int, int, int, int]:
        """Count how often the rates of a call, a rectangle, a pair and an element are paid, in all heads together."""
        rows = work.query_rows * self.num_heads + 2 * work.key_rows * self.num_key_value_heads
        pairs = work.pairs * self.num_heads * self.head_dim
        return work.calls, work.rectangles * self.num_heads, pairs, rows * self.head_dim

    def cheapest(self, plan_of: Callable[[int], PrefixPlan], max_rows: int | None = None) -> tuple[Choice, PrefixPlan]:
        """Return the cheapest strategy and `min_shared_tokens`, with its plan.

        plan_of: the plan of the batch by `min_shared_tokens`; called only if some branch point saves less than that.
        max_rows: plans with more rows are left out, except the one with the fewest.
        """
        fewest_rows = plan_of(1)
        saving = _smallest_saving(fewest_rows)
        plans = {1: fewest_rows, **{tokens: plan_of(tokens) for tokens in CANDIDATES[1:] if saving < tokens}}
        if max_rows is not None:
            plans = {tokens: plan for tokens, plan in plans.items() if plan.num_rows <= max_rows or tokens == 1}
        beside = {tokens: self.run_seconds(plan) + self._matrix_seconds(plan) for tokens, plan in plans.items()}
        choices = [
            Choice(strategy, tokens, self.attention_seconds(plan, strategy) + beside[tokens])
            for tokens, plan in plans.items()
            for strategy in self.strategies
        ]
        best = min(choices, key=lambda choice: choice.seconds)
        return best, plans[best.min_shared_tokens]


def attention_work(plan: PrefixPlan, strategy: str, on_host: bool) -> AttentionWork:
    """Count what a strategy does: on the host as `TreeLayout` cuts it into rectangles, on a device as it packs it."""
    return _COUNTS[strategy](plan, on_host)


def _cascade(plan: PrefixPlan, on_host: bool) -> AttentionWork:
    """Count chains onto themselves, and what hangs on them onto prefixes of them."""
    segments = plan.segment_starts, plan.segment_parents, plan.subtree_ends
    cut = cascade(*(x.tolist() for x in segments), GROUP if on_host else 0)
    entries = np.array([entry for entries in cut.calls for entry in entries], dtype=np.int64).reshape(-1, 4).T
    q_lengths, k_lengths = entries[1] - entries[0], entries[3] - entries[2]
    own = np.diff(cut.bounds)
    causal = _causal(own, own, on_host)
    return AttentionWork(
        calls=causal.calls + (len(q_lengths) if on_host else len(cut.calls)),
        rectangles=causal.rectangles + len(q_lengths),
        pairs=causal.pairs + int((q_lengths * k_lengths).sum()),
        query_rows=int(q_lengths.sum()),
        key_rows=int(k_lengths.sum()),
    )


def _path(plan: PrefixPlan, on_host: bool) -> AttentionWork:
    """Count the new rows of every sequence onto its whole path, whose keys are gathered."""
    new, path = np.diff(plan.path_cu_seqlens_q), np.diff(plan.path_cu_seqlens_k)
    return replace(_causal(new, path, on_host), key_rows=int(path.sum()))


def _expand(plan: PrefixPlan, on_host: bool) -> AttentionWork:
    """Count every sequence in full: all tokens are gathered, and the results of the unique rows again."""
    lengths = np.diff(plan.cu_seqlens)
    query_rows = plan.num_tokens + plan.num_rows
    return replace(_causal(lengths, lengths, on_host), query_rows=query_rows, key_rows=plan.num_tokens)


_COUNTS: Mapping[str, Callable[..., AttentionWork]] = {"cascade": _cascade, "path": _path, "expand": _expand}


def _causal(q_lengths: IntArray, k_lengths: IntArray, on_host: bool) -> AttentionWork:
    """Count entries of these lengths, causal from the bottom right. No rows are moved."""
    return _causal_on_host(q_lengths, k_lengths) if on_host else _causal_on_device(q_lengths, k_lengths)


def _causal_on_device(q_lengths: IntArray, k_lengths: IntArray) -> AttentionWork:
    """Count one packed call, whose kernel leaves hidden pairs out."""
    pairs = q_lengths * (k_lengths - q_lengths) + q_lengths * (q_lengths + 1) // 2
    return AttentionWork(calls=1, rectangles=len(q_lengths), pairs=int(pairs.sum()))


def _causal_on_host(q_lengths: IntArray, k_lengths: IntArray) -> AttentionWork:
    """Count a call for each long entry, whose kernel skips most of what it would hide, and strips for the others."""
    is_long = (q_lengths == k_lengths) & (q_lengths >= LONG)
    long = q_lengths[is_long]
    strips = _strips(q_lengths[~is_long], k_lengths[~is_long], np.cumsum(q_lengths)[~is_long])
    return AttentionWork(
        calls=strips.calls + len(long),
        rectangles=strips.rectangles + len(long),
        pairs=strips.pairs + int((long * (long + 768) // 2).sum()),
    )


def _strips(q_lengths: IntArray, k_lengths: IntArray, q_ends: IntArray) -> AttentionWork:
    """Count causal entries as `kernels/cpu_loops.py` cuts them: equal strips at equal distances are one call."""
    filled = q_lengths > 0
    q_ends, q_lengths, k_lengths = q_ends[filled], q_lengths[filled], k_lengths[filled]
    number = -(-q_lengths // STRIP)
    entry = np.arange(len(number)).repeat(number)
    place = np.arange(len(entry)) - (np.cumsum(number) - number)[entry]
    starts, stops = (q_lengths[entry] * at // number[entry] for at in (place, place + 1))
    heights, widths = stops - starts, (k_lengths - q_lengths)[entry] + stops
    first_queries = (q_ends - q_lengths)[entry] + starts
    order = np.lexsort((first_queries, heights, widths))
    same = (np.diff(widths[order]) == 0) & (np.diff(heights[order]) == 0)
    steps = np.diff(first_queries[order])
    uneven = same[1:] & same[:-1] & (steps[1:] != steps[:-1])
    num_calls = int((~same).sum() + uneven.sum()) + min(len(entry), 1)
    return AttentionWork(calls=num_calls, rectangles=len(entry), pairs=int((heights * widths).sum()))


def _smallest_saving(plan: PrefixPlan) -> int:
    """Return the fewest tokens that a branch point saves: the length of its run times its children after the first."""
    children = np.bincount(plan.segment_parents[plan.segment_parents >= 0], minlength=plan.num_segments)
    lengths = np.diff(plan.segment_starts)
    saved = lengths * np.maximum(children - 1, 1)
    return int(saved[children > 0].min(initial=np.iinfo(np.int64).max))
