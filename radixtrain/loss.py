"""Cross-entropy and log-probabilities of a list of predictions, from hidden rows or from logits.

`linear_cross_entropy` is for a head that is one matrix. Head and loss are fused: the `[R, vocabulary]` logits never
exist as a whole. `logits_cross_entropy` is the same formula for logits that a model computed itself. For a loss of your
own, such as that of a policy, `linear_logprobs` and `logits_logprobs` give each prediction's log-probability.

R predictor rows, P predictions, D hidden, V vocabulary. The k next tokens of one row share one softmax:

    loss = sum_p w_p (lse(z_r) - z_r[y_p])        with z_r = h_r W^T + b,  r = rows[p]
    dz_r = (sum of w_p) softmax(z_r) - sum_p w_p onehot(y_p)

so a predictor costs one row of logits and one log-sum-exp, however many completions follow it. Weights may be negative.
Rows are taken in chunks. The gradient of a chunk is computed
while its logits exist, as in Liger's fused linear cross-entropy, so that the backward pass is a multiplication by a
number, in place.

Two passes over the logits of a chunk find the maximum and the sum of each row, and then put `dz` in their place. On
CUDA torch.compile makes each one kernel. Of 16-bit logits they move 6 bytes an element, their operators one by one 66.

Memory of the fused loss beyond hidden, head and their gradients: the logits of one chunk, and half as much again in 16
bits. The gradient of a 16-bit head is summed in float32 and rounded in the backward pass, so that it takes 6 bytes an
element until that ends, and then 2. If the head has a `.grad` already, ours is one more until autograd has added it, as
any gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from radixtrain.kernels.functions import first_order, fused, wide

# Rows of a chunk: a quarter of D within these bounds, so that its logits are about a quarter of the head. Each chunk
# reads the head twice and its gradient once. With few rows the three products wait for memory, even more if the head is
# larger than the caches. Their GFLOP/s, float32, one thread of a shared AMD EPYC (Zen 5), torch 2.13:
#
#     rows                    16    32    64   128   256   512
#     V = 4,096    D = 256    87    96   104   106   105   106
#     V = 32,000   D = 512    69    86    96    99   104   104
#     V = 151,936  D = 1024   60    69    87    91    98            256 rows of logits are 148 MiB
CHUNK_ROWS = (128, 256)
# Elements of the logits of a chunk, which has more rows until it has as many, so that its calls cost little beside its
# products. On CPU 2 MiB in float32, 128 rows of V = 4,096. On an H100 8,192 predictors of
# Qwen3-0.6B took 94 ms with 2**24 (256 rows a chunk), 46 with 2**27 and 37 with 2**28 (1,648 rows).
MIN_CHUNK_ELEMENTS = {"cpu": 2**19, "other": 2**28}
# On a GPU a chunk takes at most a fiftieth of its memory, at 4 bytes an element: logits in float32, or in 16 bits with
# half as much for a part of a product. What is free does not count, because it changes in a run, and other chunks would
# add in another order.
BYTES_PER_ELEMENT = 4 * 50


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    loss_weights: Tensor,
    bias: Tensor | None = None,
    impl: Literal["fused", "reference"] = "fused",
) -> Tensor:
    """Sum `loss_weights[p] * cross_entropy(hidden[rows[p]] @ weight.T + bias, labels[p])` over the predictions p.

    hidden: (R, D). any floating dtype; under autocast the logits are computed in its dtype.
    weight: (V, D), bias: (V,) or None. the language-model head.
    labels: (P,), int64, in [0, V).
    rows: (P,), int64, in [0, R). which row predicts each label.
    loss_weights: (P,), float. how many original tokens a prediction stands for, or any other factor of it.
    impl: "reference" is the formula in plain torch, which holds all logits: the specification of "fused".

    Returns a scalar, float32 (float64 for float64); differentiable once in hidden, weight and bias. Softmax and sums
    are computed in that dtype whatever the logits' own is. A prediction of weight 0 adds nothing, whatever its logits;
    if there is no other, the gradient is 0, whatever the loss is divided by.

    Raises IndexError for a label that is none of the V; on a device an assertion fails there, as with torch's own.
    """
    if impl == "reference":
        logits = linear(hidden, weight, bias)
        losses = cross_entropy(logits.to(wide(logits))[rows], labels, reduction="none")
        return torch.where(loss_weights == 0, 0, loss_weights.to(losses) * losses).sum()
    if impl != "fused":
        raise ValueError(f'impl must be "fused" or "reference", got {impl!r}')
    return _cross_entropy(*_as_computed(hidden, weight, bias), labels, rows, loss_weights)


def logits_cross_entropy(logits: Tensor, labels: Tensor, rows: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum `loss_weights[p] * cross_entropy(logits[rows[p]], labels[p])` over the predictions p.

    logits: (R, V). any floating dtype, in any layout; left as they are.
    labels, rows, loss_weights: (P,). as in `linear_cross_entropy`.

    Returns a scalar, float32 (float64 for float64); differentiable once in the logits. Softmax and sums are computed in
    that dtype whatever the logits' own is.

    Holds the logits' gradient, (R, V) in their dtype, from the forward pass on, and a chunk of rows in the wider dtype.
    """
    return _cross_entropy(logits, None, None, labels, rows, loss_weights)


def linear_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `log p(labels[p])` at row `rows[p]` of the hidden rows, for each prediction.

    hidden, weight, bias, labels, rows: as in `linear_cross_entropy`.

    Returns (P,), float32 (float64 for float64); differentiable once in hidden, weight and bias.

    The backward pass computes the logits again, chunk by chunk, because how the loss depends on each log-probability is
    not known before. Both passes take 1.5 times as long as those of `linear_cross_entropy`, and 1.3 times as long as if
    all logits were kept (1,024 rows, V = 32,000, D = 512, float32, one thread of an AMD EPYC (Zen 5), torch 2.13).
    """
    return _Logprobs.apply(*_as_computed(hidden, weight, bias), labels, rows)


def logits_logprobs(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Return `log p(labels[p])` at row `rows[p]` of the logits for each prediction; see `logits_cross_entropy`.

    Returns (P,), float32 (float64 for float64); differentiable once in the logits, which are left as they are.
    """
    return _Logprobs.apply(logits, None, None, labels, rows)


class _CrossEntropy(torch.autograd.Function):
    """Fused cross-entropy, of x, weight, bias, labels, rows, loss_weights.

    x: hidden rows (R, D); or logits (R, V), with a weight of None.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *given, labels, rows, loss_weights = inputs
        logprobs, gradients = _logprobs_and_gradients(ctx.needs_input_grad, given, labels, rows, loss_weights)
        ctx.save_for_backward(*gradients, loss_weights.any())
        ctx.dtypes = [None if value is None else value.dtype for value in given]
        return 0 - (loss_weights.to(logprobs) * logprobs).sum()  # not -0.0 if no label counts

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale in place unless the graph is kept: autograd lets go of what was saved and makes it `.grad`.

        A second tensor as large as the head would be the largest of all.
        """
        *gradients, counts = ctx.saved_tensors
        scale = torch.mul if _must_keep_saved(grad) else Tensor.mul_
        factor = torch.where(counts, grad, 0)  # a mean over no labels passes infinity back
        scaled = [
            None if saved is None else scale(saved, factor).to(dtype)
            for saved, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


class _Logprobs(torch.autograd.Function):
    """Log-probabilities, of x, weight, bias, labels, rows as in `_CrossEntropy`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *given, labels, rows = inputs
        ctx.save_for_backward(*inputs)
        ones = torch.ones(len(labels), device=labels.device)
        return _logprobs_and_gradients([False] * 3, given, labels, rows, ones)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward pass of the cross-entropy with weights `-grad`: `sum_p grad_p logprob_p` is that loss."""
        *given, labels, rows = ctx.saved_tensors
        gradients = _logprobs_and_gradients(ctx.needs_input_grad, given, labels, rows, -grad)[1]
        pairs = zip(gradients, given, strict=True)
        return *(None if gradient is None else gradient.to(value.dtype) for gradient, value in pairs), None, None


def _as_computed(hidden: Tensor, *head: Tensor | None) -> list[Tensor | None]:
    """Cast to the dtype of autocast."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return [None if x is None else x.to(dtype=dtype) for x in (hidden, *head)]


def _cross_entropy(*inputs: Tensor | None) -> Tensor:
    """Detach under `no_grad`: autograd.Function looks only at requires_grad, and would build the gradients anyway."""
    if not torch.is_grad_enabled():
        inputs = tuple(None if x is None else x.detach() for x in inputs)
    return _CrossEntropy.apply(*inputs)


def _must_keep_saved(grad: Tensor) -> bool:
    """Return whether saved tensors must stay unchanged: under `retain_graph`, a batch of gradients, or the compiler.

    Torch has no public name for the first two; unknown means yes.
    """
    functorch = torch._C._functorch  # `is_grads_batched` still has tensors of the older kind
    if torch.compiler.is_compiling() or functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad):
        return True
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()


def _logprobs_and_gradients(
    needed: Sequence[bool], given: Sequence[Any], labels: Tensor, rows: Tensor, loss_weights: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return `log p` of the predictions, and the gradients of `-sum_p w_p log p` by what is given.

    A prediction of weight 0 has a `log p` of 0, even if it is not finite.

    needed: which gradients, and what else autograd says; None takes the place of others.
    given: x, weight, bias. The gradients of the last two are float32 or wider.
    """
    x, *head = given
    loss_weights = loss_weights.to(wide(x))
    logprobs = torch.zeros_like(loss_weights)
    sums = [
        torch.zeros_like(each, dtype=wide(x)) if is_needed else None
        for each, is_needed in zip(head, needed[1:3], strict=True)
    ]
    gradients = [torch.empty_like(x) if needed[0] else None, *sums]
    with torch.autocast(x.device.type, enabled=False):
        for chunk in _chunks_of(x, head[0], labels, rows, loss_weights):
            logprobs += _add_gradients(chunk, given, gradients)
    return logprobs, gradients


def _add_gradients(chunk: _Chunk, given: Sequence[Any], gradients: Sequence[Tensor | None]) -> Tensor:
    """Add a chunk's gradients to those that are not None; return its `log p`. Frees its logits before the next one."""
    (x, weight, bias), (d_x, d_weight, d_bias) = given, gradients
    x, rows = x[chunk.rows], chunk.local_rows
    logits, targets = _logits_of(x, weight, bias), (rows, chunk.labels)
    picked = logits[targets]
    top, sums = fused(_max_and_sum, logits)
    picked, logprobs = fused(_of_targets, picked, rows, chunk.loss_weights, top, sums)
    if any(each is not None for each in gradients):
        factor = torch.zeros_like(sums).index_add_(0, rows, chunk.loss_weights[:, None]) / sums
        fused(_softmax, logits, top, factor)
        # Not subtracted from the softmax there: of one near 1 a 16-bit number has lost the digits that 1 leaves of it.
        d_picked = fused(_d_targets, picked, rows, _target_weights(chunk, logits.shape[1]), factor)
        logits[targets] = d_picked.to(logits.dtype)
        if d_bias is not None:
            d_bias += logits.sum(0, dtype=d_bias.dtype)
        logits = logits if weight is None else logits.to(weight.dtype)
        if d_x is not None:
            d_x[chunk.rows] = logits if weight is None else logits @ weight
        if d_weight is not None:
            _add_product(d_weight, logits, x)
    return logprobs


def _logits_of(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the logits of a chunk in a new tensor, because it is overwritten. The host widens them once, not twice."""
    dtype = wide(x) if _on_host(x) else x.dtype
    return x.to(dtype, copy=True) if weight is None else linear(x, weight, bias).to(dtype)


def _max_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `max z` and the sum of `exp(z - max z)` of each row. Logits of float32 or wider hold that `exp` then.

    In place, as nothing in memory is larger: `torch.logsumexp` makes another tensor of their size, and took three
    times as long (V = 151,936, 128 rows on a CPU: 70 against 22 ms, beside 1.2 s for the products).
    """
    z = logits.to(wide(logits))
    top = z.amax(-1, keepdim=True)
    return top, z.sub_(top).exp_().sum(-1, keepdim=True)


def _softmax(logits: Tensor, top: Tensor, factor: Tensor) -> None:
    """Overwrite logits, or what `_max_and_sum` left there, with `factor exp(z - top)`."""
    z = logits.to(top.dtype)
    if logits.dtype != top.dtype:
        z.sub_(top).exp_()
    logits.copy_(z.mul_(factor))


def _of_targets(z: Tensor, rows: Tensor, weights: Tensor, top: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return `z - max z` of the predictions, and `log p`: 0 if the weight is 0, as that of another chunk's is."""
    z = z - top[rows, 0]
    return z, torch.where(weights == 0, weights, z - sums[rows, 0].log())


def _d_targets(z: Tensor, rows: Tensor, weights: Tensor, factor: Tensor) -> Tensor:
    return z.exp() * factor[rows, 0] - weights


def _target_weights(chunk: _Chunk, vocab_size: int) -> Tensor:
    """Return for each prediction the sum of the weights of those with its row and label."""
    targets = chunk.local_rows * vocab_size + chunk.labels
    places = torch.searchsorted(targets.sort().values, targets)  # of the first that is equal
    total = torch.zeros_like(chunk.loss_weights)
    return total.index_put_((places,), chunk.loss_weights, accumulate=True)[places]


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add `d_logits^T hidden` to `total`. A 16-bit product is rounded once a chunk, and added in float32.

    The product takes a tensor as large as the head, so it is made in parts: at most half as large as `d_logits`,
    and on CPU small enough to stay in the cache, because adding widens them first. At V = 151,936,
    D = 1024 and 128 rows in bfloat16 one part took 0.8 s, 16 parts 0.6 s and 74 parts 0.2 s.
    """
    if hidden.dtype == total.dtype:
        total.addmm_(d_logits.t(), hidden)
        return
    in_cache = 2**21 if total.device.type == "cpu" else total.numel()
    num_parts = math.ceil(total.numel() / max(1, min(d_logits.numel() // 2, in_cache)))
    for part, columns in zip(total.chunk(num_parts), d_logits.chunk(num_parts, dim=1), strict=True):
        part += columns.t() @ hidden


class _Chunk(NamedTuple):
    """Some predictor rows and all P predictions, those of other chunks at row 0 with weight 0.

    rows: which of the R.
    labels, local_rows, loss_weights: (P,). rows are counted within the chunk.
    """

    rows: slice
    labels: Tensor
    local_rows: Tensor
    loss_weights: Tensor


def _chunks_of(
    x: Tensor, weight: Tensor | None, labels: Tensor, rows: Tensor, loss_weights: Tensor
) -> Iterator[_Chunk]:
    """Cut the R rows into chunks; the predictions come in any order.

    If the logits exist already, no product needs many rows. A chunk lists all P, because only the device knows which
    are its own, and the host must not wait for it: 2 % of the time on a CPU at P = 16,384 (V = 4,096, D = 256, 128 rows
    a chunk). A negative label would count from the end: on the host it raises torch's IndexError, and as V it fails the
    assertion of the device, as one above does.
    """
    vocab_size, hidden_size = (x.shape[1], 0) if weight is None else weight.shape
    is_outside = (labels < 0) | (labels >= vocab_size)
    if _on_host(labels) and is_outside.any():
        raise IndexError(f"Target {int(labels[is_outside][0])} is out of bounds.")
    labels = torch.where(is_outside, vocab_size, labels)
    size = _rows_per_chunk(len(x), vocab_size, hidden_size, x.device)
    for start in range(0, len(x), size):
        inside = (rows >= start) & (rows < start + size)
        yield _Chunk(slice(start, start + size), labels, (rows - start) * inside, loss_weights * inside)


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _rows_per_chunk(num_rows: int, vocab_size: int, hidden_size: int, device: torch.device) -> int:
    """Return the size of about equal chunks: the last one is not small, and a single one may be half as large again.

    From 64 on a multiple of 16, which the products prefer: 208 rows took 7 % less time than 205 (Qwen3's head).
    """
    least, most = CHUNK_ROWS
    elements = MIN_CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "other"]
    if device.type == "cuda":
        elements = min(elements, torch.cuda.get_device_properties(device).total_memory // BYTES_PER_ELEMENT)
    wanted = max(least, min(hidden_size // 4, most), elements // vocab_size)
    size = math.ceil(num_rows / max(1, round(num_rows / wanted)))
    return max(1, size if size < 64 else math.ceil(size / 16) * 16)
