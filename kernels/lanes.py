"""Attention for decoding: one new row of each sequence over rows whose keys and values are stored. No backward pass.

U new rows, N query heads, K key/value heads, G = N / K, H head dim, L slots of a lane, C slots of the store. A *slot*
is a row of the store: the key and the value of one token. A query sees pieces (`merge_attention.py`):

- those of its *lane*, a private run of `step` slots of one sequence. All lanes are one batched call on a view of the
  store: nothing is copied;
- *shared rows*, stored once, that all queries below them see whole: one product for all of these queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from radixtrain.kernels.cpu_loops import EagerKernel, LoopingKernel, Rectangles
from radixtrain.kernels.merge_attention import Piece, merged_pieces
from radixtrain.kernels.varlen_args import Scoring, VarlenKernel


@dataclass(frozen=True, eq=False)
class Lanes:
    """Lanes of a store: query i sees those of the slots from `first + i * step` on that the mask shows.

    first: the first slot of the first lane. step: slots from one lane to the next.
    mask: (U, longest), float32, 0 for what is seen and -inf for what is hidden. Hidden slots hold finite values.
    order, inverse: (U,), int64. the queries in the order in which shared rows count them, and back; None if equal.
    """

    first: int
    step: int
    mask: Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None

    _rectangles: dict[int, Rectangles] = field(default_factory=dict, init=False, repr=False)  # shared by all layers

    def rectangles(self, num_queries: int) -> Rectangles:
        """Return one rectangle for each lane. num_queries: of a lane, which all see the same."""
        if num_queries not in self._rectangles:
            number, longest = self.mask.shape
            mask = self.mask[:, None, None, :]
            rectangles = Rectangles(0, num_queries, self.first, longest, mask, number=number, key_step=self.step)
            self._rectangles[num_queries] = rectangles
        return self._rectangles[num_queries]


def attention_in_lanes(
    q_UNH: Tensor,
    stored: tuple[Tensor, Tensor],
    lanes: Lanes,
    shared: Sequence[Piece],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute attention of each query over its own lane and over shared rows.

    q_UNH: the new rows, whose keys are stored already. stored: keys and values, (C, K, H) each.
    shared: their `k_rows` are slots. No query sees a key in two pieces.
    sinks_N: (N,). logits without a value, one for each head, or None.
    Returns (U, N, H), the dtype of q.

    The G query heads of a key/value head are G queries of it, so that its keys are read once: in half the time of one
    query with grouped heads (16 lanes of 60, 8 heads of 128 on 2; one CPU thread).
    A kernel that does not loop takes no strided keys with a mask; the eager kernel then computes the lanes.
    """
    looping = kernel if isinstance(kernel, LoopingKernel) else EagerKernel()
    q_UGKH = q_UNH.unflatten(1, (stored[0].shape[1], -1)).transpose(1, 2)
    part = lanes.rectangles(q_UGKH.shape[1])
    k_ULKH, v_ULKH = (part.keys(rows) for rows in stored)
    out_UGKH, lse_UKG = looping.part_forward(q_UGKH, k_ULKH, v_ULKH, part, scoring)
    q, out, lse = q_UNH, out_UGKH.transpose(1, 2).flatten(1, 2), lse_UKG.flatten(1, 2).t().contiguous()
    if lanes.order is not None:
        q, out, lse = q[lanes.order], out[lanes.order], lse[:, lanes.order]
    out, _ = merged_pieces(q, (out, lse), shared, stored, kernel, scoring, sinks_N)
    return out if lanes.inverse is None else out[lanes.inverse]
