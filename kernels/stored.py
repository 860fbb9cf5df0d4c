"""Attention onto stored keys: those of each sequence, and shared ones that several sequences see. No backward pass.

The rows are one of each of B sequences. N query heads, K key/value heads, G = N / K, H head dim, J keys a sequence.
Every query sees the keys of its own sequence that a mask shows, in one batched call, and the shared keys of some other
pieces whole, in one call for all the queries that see them: they are stored and read once (Hydragen).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.cpu_loops import EagerKernel, LoopingKernel, Rectangle
from radixtrain.kernels.merge_attention import Call, Piece, Rows
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel


@dataclass(frozen=True, eq=False)
class Readers:
    """The queries that see some shared keys whole, the same in every layer.

    rows: which of the U queries: a slice, or (n,), int64, without repeats.
    """

    rows: Rows
    number: int

    _bounds: dict[int, Ragged] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, rows: np.ndarray, device: torch.device) -> Readers:
        """Make the readers of these rows, (n,), int64, ascending. Consecutive rows become a slice."""
        first, end = int(rows[0]), int(rows[-1]) + 1
        if end - first == len(rows):
            return cls(slice(first, end), len(rows))
        return cls(torch.from_numpy(rows).to(device, non_blocking=True), len(rows))

    def onto(self, keys: Tensor) -> Ragged:
        """Return the bounds of these queries onto keys, (n, K, H)."""
        num_keys = len(keys)
        if num_keys not in self._bounds:
            self._bounds[num_keys] = Ragged.whole(self.number, num_keys, keys.device)
        return self._bounds[num_keys]


@dataclass(frozen=True, eq=False)
class Shared:
    """Shared keys and values of a layer, (n, K, H) each. first: the place of the first of them in its sequence."""

    readers: Readers
    keys: Tensor
    values: Tensor
    first: int = 0

    @property
    def call(self) -> Call:
        """Return the call of the readers onto these keys."""
        return Piece(self.readers.rows, slice(None), self.readers.onto(self.keys)), (self.keys, self.values)


def attention_to_own(
    q_BNH: Tensor, k_BJKH: Tensor, v_BJKH: Tensor, mask: Tensor, kernel: VarlenKernel, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of each sequence; returns (B, N, H) and the log-sum-exp (N, B).

    mask: (B, 1, 1, J), float32, 0 for what is seen and -inf for what is hidden. Hidden keys are finite.

    The G query heads of a key/value head are G queries of it, so that its keys are read once: in half the time of one
    query with grouped heads (16 sequences of 60, 8 heads of 128 on 2; one CPU thread).
    A kernel that does not loop takes no strided keys with a mask; the eager kernel then computes this.
    """
    looping = kernel if isinstance(kernel, LoopingKernel) else EagerKernel()
    q_BKGH = q_BNH.unflatten(1, (k_BJKH.shape[2], -1))
    part = Rectangle(slice(0, q_BKGH.shape[2]), slice(0, k_BJKH.shape[1]), mask)
    out_BKGH, lse_BKG = looping.part_forward(q_BKGH, k_BJKH.transpose(1, 2), v_BJKH.transpose(1, 2), part, scoring)
    return out_BKGH.flatten(1, 2), lse_BKG.flatten(1, 2).t().contiguous()
