"""What a varlen attention kernel receives and returns.

T query tokens, J key tokens, N query heads, K key/value heads, H head dim. A ragged call holds E entries; entry e
attends from queries `cu_seqlens_q[e:e+2]` to keys `cu_seqlens_k[e:e+2]`. Causal means from the bottom right: the last
query sees every key, as in flash-attention >= 2.1. An entry without keys gives zeros and a log-sum-exp of -inf.

The backward takes the *final* output and log-sum-exp of each query. Given those merged from several pieces, it
returns exactly this piece's share of dq, dk and dv (`merge_attention.py` says why).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How an attention score becomes a weight. Hashable.

    scale: factor on the products of queries and keys.
    softcap: None, or c in `c * tanh(s / c)`, applied to the scaled products before the mask (Gemma 2).
    window: None, or w, at least 1: query i sees keys j with `i - w < j <= i`, in tokens. Only for causal calls whose
        entries have whole sequences as keys, in order (`path`, `expand`).
    """

    scale: float
    softcap: float | None = None
    window: int | None = None

    @cached_property
    def without_window(self) -> Scoring:
        """Return the same for calls whose keys no window hides."""
        return replace(self, window=None)

    def of(self, products: Tensor) -> Tensor:
        """Turn the products `q k^T` into scores, differentiable."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


@dataclass(eq=False)
class Ragged:
    """Bounds of one varlen call. Do not change one: `cpu_loops.py` keeps its rectangles in it for the next layer.

    cu_seqlens_q, cu_seqlens_k: (E+1,), int32, on the device of the tensors.
    max_seqlen_q, max_seqlen_k: longest entry, in tokens.
    causal: bottom-right causal inside each entry; otherwise every query sees every key of its entry.
    mask: of a single entry, for kernels that loop: (queries, keys), float32, 0 for what is seen and -inf for what is
        hidden, which then holds in place of `causal`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    mask: Tensor | None = None

    rectangles: dict[int | None, Any] = field(default_factory=dict, init=False, repr=False)  # by window

    @classmethod
    def whole(cls, num_queries: int, num_keys: int, device: torch.device) -> Ragged:
        """Make a call of one entry in which every query sees every key. Does not wait for the device."""
        bounds = torch.tensor([[0, num_queries], [0, num_keys]], dtype=torch.int32, device="cpu")
        of_queries, of_keys = bounds.to(device, non_blocking=True)
        return cls(of_queries, of_keys, num_queries, num_keys, causal=False)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """Return what kernels take by position."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


def added_to_scores(hidden: Tensor) -> Tensor:
    """Return a mask, float32, that is added to scores: -inf for what is hidden, bool, and 0 for what is seen."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


class VarlenKernel(Protocol):
    """A stateless kernel. Shapes: q, out (T, N, H); k, v (J, K, H); lse (N, T), float32, or float64 for float64."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Compute the output and log-sum-exp."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq, dk, dv of `p = exp(scores - lse)`, `dscores = p (dout v^T - rowsum(dout * out))`."""
        ...
