"""Steps on several ranks, by data parallel and with split micro-batches: what a rank computes and sends, predicted.

Index work on the sequences, without a model. Data parallel computes a prefix on every rank that has a sequence of it;
a group of `sp_size` ranks computes it once and sends rows and heads around attention (`hf/sequence_parallel.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixtrain.collators.batching import SequenceCost, share_by_unique_tokens
from radixtrain.collators.row_split import rows_per_rank
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.cost_model import StepCost
from radixtrain.tree.plan import build_prefix_plan

Steps = Sequence[Sequence[IntArray]]


class Division(NamedTuple):
    """Steps on `num_ranks` ranks, in groups of `sp_size` that split each micro-batch; groups of 1 are data parallel.

    r: tokens per computed token.
    num_rows: of the rank that computes most, and sent_bytes: that it sends for attention, in one layer, forward and
        backward; both are means over the steps.
    seconds: that a layer takes, the mean over the steps, by the fixed rates of the cost model. What is alike in every
        division, such as gradients that are averaged, is left out.
    most_rows: of a rank at once, in the largest micro-batch of all steps.
    memory_bytes: peak of a rank, if something predicts it.
    """

    num_ranks: int
    sp_size: int
    r: float
    num_rows: float
    sent_bytes: float
    seconds: float
    most_rows: int
    memory_bytes: int | None = None


def divide(
    steps: Steps, num_ranks: int, sp_size: int, max_tokens: int, step_cost: StepCost, element_bytes: int
) -> Division:
    """What branches that are too small save, and padding, is not taken into account.

    steps: the token ids of each sequence of each step. max_tokens: of a rank. element_bytes: of a number that is sent.
    """
    cost = SequenceCost.of(step_cost)
    num_computed, most_rows, num_rows, sent, seconds = 0, 0, [], [], []
    for sequences in steps:
        shares = share_by_unique_tokens(sequences, num_ranks // sp_size, max_tokens * sp_size, cost=cost)
        found = [[_part(sequences, each, sp_size, step_cost) for each in groups] for groups in shares.groups]
        rows = [sum(at_once for at_once, _ in of_group) for of_group in found]
        num_computed += sp_size * sum(rows)
        most_rows = max(most_rows, *(at_once for of_group in found for at_once, _ in of_group))
        num_rows.append(max(rows))
        sent.append(max(rows) * step_cost.sent_numbers(sp_size) * element_bytes)
        computing = max(sum(seconds for _, seconds in of_group) for of_group in found)
        seconds.append(computing + sent[-1] * step_cost.rates.sent_byte)
    num_tokens = sum(len(ids) for sequences in steps for ids in sequences)
    busiest, sent_bytes, taken = (statistics.fmean(each) for each in (num_rows, sent, seconds))
    return Division(num_ranks, sp_size, num_tokens / num_computed, busiest, sent_bytes, taken, most_rows)


def _part(sequences: Sequence[IntArray], group: Sequence[int], sp_size: int, step_cost: StepCost) -> tuple[int, float]:
    """Cost a rank that shares a micro-batch with others: its rows, and seconds of a layer on them and on its heads."""
    mine = [sequences[index] for index in group]
    plan = build_prefix_plan(np.concatenate(mine), cumulative(np.array([len(ids) for ids in mine], dtype=np.int64)))
    num_rows = rows_per_rank(plan.num_rows, sp_size)
    of_rank = step_cost.of_rank(sp_size)
    attention = min(of_rank.attention_seconds(plan, strategy) for strategy in step_cost.strategies)
    exchange = step_cost.rates.exchange if sp_size > 1 else 0.0
    return num_rows, num_rows * step_cost.row_seconds + attention + exchange


def sp_sizes(num_ranks: int, num_heads: int) -> list[int]:
    """Numbers of ranks that can split a micro-batch: they divide the ranks and the heads of queries."""
    return [size for size in range(1, num_ranks + 1) if num_ranks % size == 0 == num_heads % size]
