"""The identity on which tree attention rests, in plain torch. Read and run this first:

    python -m radixtrain.kernels.merge_identity

Keys are split into two halves, such as a shared prompt and what follows it. Attention over each half, merged by the
log-sum-exps of their scores, is attention over all keys. And the stock backward pass of a half, given the *merged*
output and log-sum-exp, returns the half's share of the gradients: of its own keys and values all there is.

>>> import torch
>>> from torch.nn.functional import scaled_dot_product_attention
>>> forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
>>> backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
>>> q, k, v, d_out = torch.randn(4, 1, 2, 6, 8, dtype=torch.float64)  # four of one row, 2 heads, 6 tokens, 8 wide
>>> halves = [(k[:, :, :4], v[:, :, :4]), (k[:, :, 4:], v[:, :, 4:])]
>>> out, lse = merge_attention(*(forward(q, *half) for half in halves))
>>> whole = [x.clone().requires_grad_() for x in (q, k, v)]
>>> expected = scaled_dot_product_attention(*whole)
>>> torch.testing.assert_close(out, expected)

>>> shares = [backward(d_out, q, *half, out, lse, 0.0, False) for half in halves]
>>> d_q = shares[0][0] + shares[1][0]
>>> d_k, d_v = (torch.cat([share[i] for share in shares], dim=2) for i in (1, 2))
>>> torch.testing.assert_close((d_q, d_k, d_v), torch.autograd.grad(expected, whole, d_out))

Why: a half's weights are `exp(score - lse)` with the lse of all keys, and what its scores get is
`weights * (d_out v^T - rowsum(d_out * out))`. All other keys enter by these two numbers of a row.

`merge_attention.py` does the same for any number of pieces of rows, in place. Source: Hydragen (arXiv 2402.05099).
"""

from __future__ import annotations

import doctest

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]


def merge_attention(one: Attended, other: Attended) -> Attended:
    """Merge the attention of the same queries over two sets of keys into that over both. Differentiable, symmetric.

    one, other: output (..., H), and the log-sum-exp (...) of its scores, in any floating dtype. So is what it returns.
    """
    (out_1, lse_1), (out_2, lse_2) = one, other
    lse = torch.logaddexp(lse_1, lse_2)
    return out_1 * (lse_1 - lse).exp()[..., None] + out_2 * (lse_2 - lse).exp()[..., None], lse


if __name__ == "__main__":
    doctest.testmod(verbose=True)
