"""Plans of nested sequences, and what attention on them is given.

U rows, N query heads, K key/value heads, H head dim.

Three sequences that share a beginning, with labels on shared tokens and several at a branch.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from one_softmax import random_tensors
from torch import Tensor

from radixtrain.kernels.merge_attention import Piece
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

FOREST = [[7, 8, 9], [7, 8, 5], [7, 8, 9, 6], [9, 1], [9, 2, 2], [9, 2, 4]]
DEEP = [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 1], [1, 1, 2, 2], [1, 2], [3, 1, 1, 1, 1], [3, 1, 1, 1, 2], [3, 2]]
# Two trees: one of three levels below [1, 1, 2], one of one level below [2]; a prefix of another; one twice.
NESTED = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 2, 2], [2, 1, 1], [2, 3, 3], [2, 1, 1], [5]]


def plan_of(sequences: Any, **options: Any) -> PrefixPlan:
    """options: of `build_prefix_plan`."""
    tokens = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(tokens, np.cumsum([0, *map(len, sequences)]), **options)


def agent(turns: int, observed: int = 40, answered: int = 10) -> list[list[int]]:
    """A history that each turn makes longer, with an answer after every turn."""
    return [[*range(observed * (n + 1)), *[100_000 + n] * answered] for n in range(turns)]


def comb(forks: int) -> list[list[int]]:
    """As much below each fork as between two."""
    return agent(forks, observed=5, answered=5)


def longer(sequences: list[list[int]], times: int) -> list[list[int]]:
    """The same tree with every run `times` as long."""
    return [[token for token in sequence for _ in range(times)] for sequence in sequences]


def attention_inputs(
    plan: PrefixPlan, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), head_dim: int = 8, seed: int = 0
) -> list[Tensor]:
    """q, k, v, dout. No loss on padding, whose output means nothing."""
    tensors = random_tensors((plan.num_rows, plan.num_rows), dtype, heads, head_dim, seed)
    tensors[3][plan.num_unique_tokens :] = 0
    return tensors


def mask_pairs(plan: PrefixPlan) -> set[tuple[int, int]]:
    """Every (query, key) that the tree mask allows."""
    ends = plan.row_subtree_ends.tolist()
    return {(query, key) for key, end in enumerate(ends) for query in range(key, end)}


def seen_pairs(piece: Piece, num_rows: int) -> Counter[tuple[int, int]]:
    """Count every (query, key) that a piece computes. Asserts that what it says of its sizes is true."""
    rows, ragged = torch.arange(num_rows), piece.ragged
    queries, keys = rows[piece.q_rows].tolist(), rows[piece.k_rows].tolist()
    q, k = ragged.cu_seqlens_q.tolist(), ragged.cu_seqlens_k.tolist()
    assert (q[0], q[-1], k[0], k[-1]) == (0, len(queries), 0, len(keys))
    assert (ragged.max_seqlen_q, ragged.max_seqlen_k) == tuple(max(np.diff(x), default=0) for x in (q, k))
    entries = tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))
    assert ragged.bounds in (None, entries)
    found: Counter[tuple[int, int]] = Counter()
    for (q0, q1, k0, k1), mask in zip(entries, ragged.masks or [None] * len(entries), strict=True):
        for i in range(q0, q1):
            seen = k1 - (q1 - 1 - i) if ragged.causal else k1  # bottom-right causal: the last query sees every key
            places = range(k0, seen) if mask is None else (k0 + torch.where(mask[i - q0] == 0)[0]).tolist()
            found.update((queries[i], keys[place]) for place in places)
    return found


FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
]
