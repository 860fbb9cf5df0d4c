"""Plans of nested sequences, and what attention on them is given.

U rows, N query heads, K key/value heads, H head dim.
"""

from typing import Any

import numpy as np
import torch
from one_softmax import random_tensors
from torch import Tensor

from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["DEEP", "FOREST", "NESTED", "attention_inputs", "longer", "plan_of"]

FOREST = [[7, 8, 9], [7, 8, 5], [7, 8, 9, 6], [9, 1], [9, 2, 2], [9, 2, 4]]
DEEP = [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 1], [1, 1, 2, 2], [1, 2], [3, 1, 1, 1, 1], [3, 1, 1, 1, 2], [3, 2]]
# Two trees: one of three levels below [1, 1, 2], one of one level below [2]; a prefix of another; one twice.
NESTED = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 2, 2], [2, 1, 1], [2, 3, 3], [2, 1, 1], [5]]


def plan_of(sequences: Any, **options: Any) -> PrefixPlan:
    """options: of `build_prefix_plan`."""
    tokens = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(tokens, np.cumsum([0, *map(len, sequences)]), **options)


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
