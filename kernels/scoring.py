"""How an attention score becomes a weight: the options of one kernel call, all host values.

A window keeps its meaning only if an entry's keys are a whole sequence in order (`path`, `expand`); it counts from the
bottom right, like causal attention. Soft-capped pieces merge by log-sum-exp as others do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Scoring"]


@dataclass(frozen=True)
class Scoring:
    """What a kernel receives beside the tensors. Hashable.

    scale: factor on the products of queries and keys.
    softcap: None, or c in `c * tanh(s / c)`, applied to the scaled products before the mask (Gemma 2).
    window: None, or w, at least 1: query i sees keys j with `i - w < j <= i`, in tokens.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None

    def of(self, products: Tensor) -> Tensor:
        """Scores of the products `q k^T`, differentiable."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
