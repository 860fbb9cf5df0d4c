"""Cross-entropy of a list of predictions, from hidden rows or from logits.

`linear_cross_entropy` is for a head that is one matrix. Head and loss are fused: the `[R, vocabulary]` logits never
exist as a whole. `logits_cross_entropy` is the same formula for logits that a model computed itself.

R predictor rows, P predictions, D hidden, V vocabulary. The k next tokens of one row share one softmax:

    loss = sum_p w_p (lse(z_r) - z_r[y_p])        with z_r = h_r W^T + b,  r = rows[p]
    dz_r = (sum of w_p) softmax(z_r) - sum_p w_p onehot(y_p)

so a predictor costs one row of logits and one log-sum-exp, however many completions follow it. Rows are taken in
chunks (`kernels/loss_chunks.py`). The gradient of a chunk is computed while its logits exist, as in Liger's fused
linear cross-entropy, so that the backward pass is a multiplication by a number, in place.

Memory of the fused loss beyond hidden, head and their gradients: the logits of one chunk, and half as much again in 16
bits. The gradient of a 16-bit head is summed in float32 and rounded in the backward pass, so that it takes 6 bytes an
element until that ends, and then 2. If the head has a `.grad` already, ours is one more until autograd has added it, as
any gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from radixtrain.kernels.loss_chunks import Chunk, chunks_of, rows_per_chunk

__all__ = ["linear_cross_entropy", "logits_cross_entropy", "logits_logprobs", "prediction_logprobs"]


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
    if not torch.is_grad_enabled():  # autograd.Function looks only at requires_grad, and would build the gradients
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, rows, loss_weights)


def logits_cross_entropy(logits: Tensor, labels: Tensor, rows: Tensor, loss_weights: Tensor) -> Tensor:
    """`sum_p loss_weights[p] * cross_entropy(logits[rows[p]], labels[p])`, a sum and not a mean.

    logits: (R, V). any floating dtype, in any layout; left as they are.
    labels, rows, loss_weights: (P,). as in `linear_cross_entropy`.

    Returns a scalar, float32 (float64 for float64); differentiable once in the logits. Softmax and sums are computed in
    that dtype whatever the logits' own is.

    Holds the logits' gradient, (R, V) in their dtype, from the forward pass on, and a chunk of rows in the wider dtype.
    """
    if not torch.is_grad_enabled():
        logits = logits.detach()
    return _LogitsCrossEntropy.apply(logits, labels, rows, loss_weights)


@torch.no_grad()
def prediction_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor, bias: Tensor | None = None
) -> Tensor:
    """(P,), float32 or float64. `log p(labels[p])` at row `rows[p]`; arguments as in `linear_cross_entropy`."""
    size = rows_per_chunk(len(hidden), len(weight), hidden.shape[1], hidden.device)
    return _logprobs(lambda taken: _logits(hidden[taken], weight, bias), size, hidden, labels, rows)


@torch.no_grad()
def logits_logprobs(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """(P,), float32 or float64. `log p(labels[p])` at row `rows[p]`; arguments as in `logits_cross_entropy`."""
    return _logprobs(lambda taken: _widened(logits[taken]), _rows_of_logits(logits), logits, labels, rows)


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
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            size = rows_per_chunk(len(hidden), len(weight), hidden.shape[1], hidden.device)
            for chunk in chunks_of(size, len(hidden), labels, rows, loss_weights.to(wide)):
                loss += _add_gradients(chunk, hidden[chunk.rows], weight, bias, d_hidden, d_weight, d_bias)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """In place, unless the graph is kept for another time: autograd lets go of what we saved and makes it `.grad`.

        A second tensor as large as the head would be the largest of all.
        """
        scale = torch.mul if _may_be_asked_again(grad) else Tensor.mul_
        scaled = [
            None if saved is None else scale(saved, grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


class _LogitsCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Tensor, loss_weights: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        d_logits = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss = torch.zeros((), dtype=wide, device=logits.device)
        with torch.autocast(logits.device.type, enabled=False):
            for chunk in chunks_of(_rows_of_logits(logits), len(logits), labels, rows, loss_weights.to(wide)):
                loss += _add_gradient_of_logits(chunk, logits[chunk.rows], d_logits)
        ctx.save_for_backward(d_logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """In place, as that of `_LinearCrossEntropy`."""
        (d_logits,) = ctx.saved_tensors
        scale = torch.mul if _may_be_asked_again(grad) else Tensor.mul_
        return None if d_logits is None else scale(d_logits, grad).to(d_logits.dtype), None, None, None


def _may_be_asked_again(grad: Tensor) -> bool:
    """Whether what was saved has to stay as it is: under `retain_graph`, a batch of gradients, or the compiler.

    Torch has no public name for the first two; unknown means yes.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(grad):
        return True
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()


def _logprobs(logits_of: Callable[[slice], Tensor], size: int, over: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """(P,). logits_of: the logits of some of the R rows, in a new tensor, float32 or wider. over: (R, ...)."""
    inside = torch.ones(len(labels), dtype=torch.promote_types(over.dtype, torch.float32), device=over.device)
    logprobs = torch.zeros_like(inside)
    for chunk in chunks_of(size, len(over), labels, rows, inside):
        values, _ = _logprobs_and_sums(logits_of(chunk.rows), chunk)
        logprobs[chunk.places] += chunk.loss_weights * values
    return logprobs


def _rows_of_logits(logits: Tensor) -> int:
    """Rows of a chunk if the logits exist already."""
    return rows_per_chunk(len(logits), logits.shape[1], 0, logits.device)


def _add_gradients(
    chunk: Chunk,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> Tensor:
    """Loss of a chunk; adds its gradients to those that are not None. Frees its logits before the next chunk begins."""
    logits = _logits(hidden, weight, bias)
    logprobs, sums = _logprobs_and_sums(logits, chunk)
    if d_hidden is not None or d_weight is not None or d_bias is not None:
        d_logits = _softmax_minus_targets(logits, sums, chunk)
        if d_bias is not None:
            d_bias += d_logits.sum(0)
        del logits  # so that the next line frees them, if it makes a copy in 16 bit
        d_logits = d_logits.to(weight.dtype)
        if d_hidden is not None:
            d_hidden[chunk.rows] = d_logits @ weight
        if d_weight is not None:
            _add_product(d_weight, d_logits, hidden)
    return -(chunk.loss_weights * logprobs).sum()


def _add_gradient_of_logits(chunk: Chunk, logits: Tensor, d_logits: Tensor | None) -> Tensor:
    """As `_add_gradients`, for logits that exist."""
    logits = _widened(logits)
    logprobs, sums = _logprobs_and_sums(logits, chunk)
    if d_logits is not None:
        d_logits[chunk.rows] = _softmax_minus_targets(logits, sums, chunk)
    return -(chunk.loss_weights * logprobs).sum()


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a chunk: multiplied in the dtype of the head, as the model's own head does, then widened."""
    return torch.nn.functional.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))


def _widened(logits: Tensor) -> Tensor:
    """A copy of a chunk in float32 or wider, even if it is wide already, because the copy is overwritten."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)


def _logprobs_and_sums(logits: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """(N,) `log p` of the chunk's predictions and, by row, the sum of the `exp(z - max z)` that the logits become.

    In place, as the logits are the largest thing in memory: `torch.logsumexp` makes another tensor of their size, and
    took three times as long (V = 151,936, 128 rows: 70 against 22 ms, beside 1.2 s for the products).
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    picked = logits[chunk.local_rows, chunk.labels]
    sums = logits.exp_().sum(-1)
    return picked - sums.log()[chunk.local_rows], sums


def _softmax_minus_targets(exps: Tensor, sums: Tensor, chunk: Chunk) -> Tensor:
    """`dz` in place of `exp(z - max z)`."""
    weight_of_row = torch.zeros_like(sums).index_add_(0, chunk.local_rows, chunk.loss_weights)
    d_logits = exps.mul_((weight_of_row / sums)[:, None])
    return d_logits.index_put_((chunk.local_rows, chunk.labels), -chunk.loss_weights, accumulate=True)


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """`total += d_logits^T hidden`. A 16-bit product is rounded once a chunk, and added in float32.

    That needs the product by itself, which is as large as the head, so it is made in parts: at most half as large as
    `d_logits`, and on CPU small enough to stay in the cache, because adding widens them first. At V = 151,936,
    D = 1024 and 128 rows in bfloat16 one part took 0.8 s, 16 parts 0.6 s and 74 parts 0.2 s.
    """
    if hidden.dtype == total.dtype:
        total.addmm_(d_logits.t(), hidden)
        return
    in_cache = 2**21 if total.device.type == "cpu" else total.numel()
    num_parts = math.ceil(total.numel() / max(1, min(d_logits.numel() // 2, in_cache)))
    for part, columns in zip(total.chunk(num_parts), d_logits.chunk(num_parts, dim=1), strict=True):
        part += columns.t() @ hidden
