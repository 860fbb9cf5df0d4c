"""What a varlen attention kernel receives and what it returns.

T query tokens, J key tokens, N query heads, K key/value heads, H head dim. A ragged call holds E entries; entry e
attends from queries `cu_seqlens_q[e:e+2]` to keys `cu_seqlens_k[e:e+2]`. Causal means from the bottom right: the last
query sees every key, as in flash-attention >= 2.1. An entry without keys gives zeros and a log-sum-exp of -inf.

The backward takes the *final* output and log-sum-exp of each query. Given those that several pieces were merged to, it
returns exactly this piece's share of dq, dk and dv (`pieces.py` says why).

A `Scoring` carries scale, soft-cap and window. A window goes with causal calls only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from radixtrain.kernels.rectangles import Bounds, Cut, cut_of
from radixtrain.kernels.scoring import Scoring

__all__ = ["Ragged", "VarlenKernel"]


@dataclass(eq=False)
class Ragged:
    """Bounds of one varlen call. Do not change one: `rectangles` keeps its cuts, because every layer asks for them.

    cu_seqlens_q, cu_seqlens_k: (E+1,), int32, on the device of the tensors.
    max_seqlen_q, max_seqlen_k: longest entry, in tokens.
    causal: bottom-right causal inside each entry; otherwise every query sees every key of its entry.
    bounds: the same bounds as host integers, one for each entry, for kernels that loop.
    masks: one for each entry, for kernels that loop: None, or (queries, keys), float32, 0 for what is seen and -inf for
        what is hidden, which then holds in place of `causal`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    bounds: tuple[Bounds, ...] | None = None
    masks: tuple[Tensor | None, ...] | None = None

    _cuts: dict[int | None, Cut] = field(default_factory=dict, init=False, repr=False)  # by window

    def rectangles(self, window: int | None = None) -> Cut:
        """The call, cut into rectangles (`rectangles.py`); a window goes with a causal call.

        Without `bounds` this waits for the device: only the eager kernel on CUDA comes here.
        """
        assert self.causal or window is None, "a window counts from the last key"
        if window not in self._cuts:
            bounds = self._read_bounds() if self.bounds is None else self.bounds
            masks = self.masks or (None,) * len(bounds)
            self._cuts[window] = cut_of(bounds, masks, self.causal, window, self.cu_seqlens_q.device)
        return self._cuts[window]

    def _read_bounds(self) -> tuple[Bounds, ...]:
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return tuple((*q, *k) for q, k in zip(pairwise(q), pairwise(k), strict=True))


class VarlenKernel(Protocol):
    """Stateless. Shapes: q, out (T, N, H); k, v (J, K, H); lse (N, T), float32 (float64 for float64 inputs)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of `p = exp(scores - lse)`, `dscores = p (dout v^T - rowsum(dout * out))`."""
        ...
