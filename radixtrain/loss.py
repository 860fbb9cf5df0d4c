"""Cross-entropy of a list of predictions, head and loss fused: the `[P, vocabulary]` logits never exist as a whole.

R predictor rows, P predictions, D hidden, V vocabulary. The k next tokens of one row share one softmax:

    loss = sum_p w_p (lse(z_r) - z_r[y_p])        with z_r = h_r W^T + b,  r = rows[p]
    dz_r = (sum of w_p) softmax(z_r) - sum_p w_p onehot(y_p)

so a predictor costs one row of logits and one log-sum-exp, however many completions follow it. Rows are taken in
chunks, and the gradient of a chunk is computed while its logits are there (as Liger's fused linear cross-entropy
does), so that the backward pass is a multiplication by a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["linear_cross_entropy", "prediction_logprobs"]

# A chunk's logits: 2^24 numbers, 64 MiB in float32, are 110 rows of Qwen3's vocabulary.
CHUNK_ELEMENTS = 2**24


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    loss_weights: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`sum_p loss_weights[p] * cross_entropy(hidden[rows[p]] @ weight.T + bias, labels[p])`, a sum and not a mean.

    hidden: (R, D). any floating dtype; under autocast the logits are computed in its dtype.
    weight: (V, D), bias: (V,) or None. the language-model head.
    labels: (P,), int64, in [0, V).
    rows: (P,), int64, in [0, R). which row predicts each label.
    loss_weights: (P,), float. how many original tokens a prediction stands for.

    Returns a scalar, float32 (float64 for float64); differentiable once in hidden, weight and bias. Softmax and sums
    are computed in that dtype whatever the logits' own is.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():  # autograd.Function looks at requires_grad alone, and would build the gradients
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, rows, loss_weights)


@torch.no_grad()
def prediction_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor, bias: Tensor | None = None
) -> Tensor:
    """(P,), float32 or float64. `log p(labels[p])` at row `rows[p]`; arguments as in `linear_cross_entropy`."""
    logprobs = torch.zeros(len(labels), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for chunk in _chunks(hidden, weight, labels, rows):
        logits = _logits(hidden[chunk.rows], weight, bias)
        logprobs += (_picked(logits, chunk) - logits.logsumexp(-1)[chunk.local_rows]) * chunk.inside
    return logprobs


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some predictor rows, with every prediction seen from them: those of other rows point at row 0 with factor 0.

    That costs P small gathers a chunk, and spares the host from asking the device which predictions are whose.
    """

    rows: slice
    labels: Tensor
    local_rows: Tensor
    inside: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows: Tensor,
        loss_weights: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss_weights = loss_weights.to(wide)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(hidden, weight, labels, rows):
                logits = _logits(hidden[chunk.rows], weight, bias)
                d_logits, chunk_loss = _softmax_minus_targets(logits, chunk, loss_weights * chunk.inside)
                loss += chunk_loss
                if d_hidden is not None:
                    d_hidden[chunk.rows] = d_logits.to(weight.dtype) @ weight
                if d_weight is not None:
                    _add_product(d_weight, d_logits, hidden[chunk.rows])
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if saved is None else (saved * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Iterator[_Chunk]:
    """Cut the R rows so that a chunk's logits stay within the budget."""
    num_rows, size = hidden.shape[0], max(1, CHUNK_ELEMENTS // weight.shape[0])
    for start in range(0, num_rows, size):
        end = min(start + size, num_rows)
        inside = (rows >= start) & (rows < end)
        yield _Chunk(slice(start, end), labels, (rows - start) * inside, inside)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a chunk: multiplied in the dtype of the head, as the model's own head does, then widened."""
    return torch.nn.functional.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))


def _picked(logits: Tensor, chunk: _Chunk) -> Tensor:
    return logits[chunk.local_rows, chunk.labels]


def _softmax_minus_targets(logits: Tensor, chunk: _Chunk, loss_weights: Tensor) -> tuple[Tensor, Tensor]:
    """`dz` and the loss of a chunk. Overwrites the logits: they are the largest thing in memory."""
    lse = logits.logsumexp(-1)
    loss = (loss_weights * (lse[chunk.local_rows] - _picked(logits, chunk))).sum()
    weight_of_row = torch.zeros_like(lse).index_add_(0, chunk.local_rows, loss_weights)
    d_logits = logits.sub_(lse[:, None]).exp_().mul_(weight_of_row[:, None])
    d_logits.index_put_((chunk.local_rows, chunk.labels), -loss_weights, accumulate=True)
    return d_logits, loss


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """`total += d_logits^T hidden`. A 16-bit product is rounded once a chunk, and added in float32."""
    if hidden.dtype == total.dtype:
        total.addmm_(d_logits.t(), hidden)
    else:
        total += d_logits.to(hidden.dtype).t() @ hidden
