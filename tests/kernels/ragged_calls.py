"""Ragged calls, from the lengths of their entries."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from radixtrain.kernels.varlen_args import Ragged


def ragged(
    queries: Sequence[int], keys: Sequence[int], causal: bool = False, device: str | torch.device = "cpu"
) -> Ragged:
    """A call whose entries have so many queries and keys."""
    bounds = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device) for lengths in (queries, keys))
    return Ragged(*bounds, max(queries, default=0), max(keys, default=0), causal)
