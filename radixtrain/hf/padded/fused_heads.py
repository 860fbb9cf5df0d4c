"""Head and loss in one function of another library, computed on distinct rows: TRL's log-probabilities, Liger's loss.

These functions take hidden rows, the matrix of the head and labels, and are autograd functions, to which torch gives
whole tensors. So ours replace them, in the modules that call them. Other tensors than our hidden states go to the
original function, and so do calls that ours does not compute, as whole rows. Both are known to be losses over tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from radixtrain.hf.padded.places import check_gradient_at, refuse_counted
from radixtrain.hf.padded.row_functions import MIN_SAVING
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.hf.token_losses import for_token_loss
from radixtrain.kernels.rows import gather_rows
from radixtrain.loss import linear_cross_entropy


class FusedHead:
    """Replaces an autograd function of hidden rows.

    on_rows: computes the result from the function, the `SpreadRows` and the other arguments; NotImplemented for a call
        that needs whole rows.
    """

    def __init__(self, ordinary: Any, on_rows: Callable[..., Any]):
        self.ordinary, self.on_rows = ordinary, on_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ordinary, name)

    def apply(self, hidden: Tensor, *others: Any) -> Any:
        hidden = for_token_loss(hidden)
        if type(hidden) is not SpreadRows:
            return self.ordinary.apply(hidden, *others)
        found = self.on_rows(self.ordinary, hidden, *others) if hidden.is_lazy else NotImplemented
        if found is NotImplemented:
            return self.ordinary.apply(hidden.whole(), *others)
        hidden.mark_read()
        return found


def trl_logprobs(
    ordinary: Any, hidden: SpreadRows, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
) -> Any:
    """Score each pair of a row and a label once. Without Triton TRL scores every place of the batch."""
    vocab_size = len(weight)
    kinds = labels.clamp(-1, vocab_size) + 1  # TRL has a number for "not a token", too
    pairs, back = (hidden.rows * (vocab_size + 2) + kinds).unique(return_inverse=True)
    rows, labels = gather_rows(hidden.table, pairs // (vocab_size + 2)), pairs % (vocab_size + 2) - 1
    hidden.report.count_head(len(back), len(pairs))
    found = ordinary.apply(rows, weight, bias, labels, *others)
    return tuple(None if each is None else _placed(hidden, each, back) for each in found)


def _placed(hidden: SpreadRows, values: Tensor, back: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values[back]
    placed = gather_rows(values, back)
    check_gradient_at(hidden.padding, placed)
    return placed


# Arguments of Liger's after the hidden rows: those that are read here, and those that change how it computes, not what.
# Any other has to be as by default, such as a softcap or label smoothing.
LIGER_READS = {"weight", "target", "bias", "ignore_index", "reduction"}
LIGER_HOW = {"accum_dtype", "ce_impl", "ce_mode", "chunk_mem_const"}


def liger_loss(ordinary: Any, hidden: SpreadRows, *others: Any) -> Any:
    """Compute Liger's sum or mean by `radixtrain.loss`, on each distinct row that has a label.

    Liger's own function computes a row for every place, and has no weights for rows that stand for several.
    """
    bound = signature(ordinary.forward).bind(None, hidden, *others)
    bound.apply_defaults()
    given = bound.arguments
    for name in set([*given][2:]) - LIGER_READS - LIGER_HOW:
        if isinstance(given[name], Tensor) or given[name] != bound.signature.parameters[name].default:
            return NotImplemented
    target, reduction = given["target"], given["reduction"]
    if reduction not in ("mean", "sum") or target.dtype != torch.int64 or target.shape != hidden.place_rows.shape:
        return NotImplemented
    counted = target != given["ignore_index"]
    rows, back = hidden.rows[counted].unique(return_inverse=True)
    if len(target) < MIN_SAVING * len(rows):
        return NotImplemented
    hidden.report.count_head(len(target), len(rows))
    table, weights = gather_rows(hidden.table, rows), torch.ones(len(back), device=hidden.table.device)
    loss = linear_cross_entropy(table, given["weight"], target[counted], back, weights, given["bias"])
    refuse_counted(hidden.padding, counted, loss)
    mean = loss / max(1, len(back)) if reduction == "mean" else loss  # without a label Liger returns 0
    return mean.float(), None, None, None


LIGER = "LigerFusedLinearCrossEntropyFunction"
HEADS = (
    ("trl.trainer.utils", "_ChunkedLogProbFunction", trl_logprobs),
    ("liger_kernel.transformers.functional", LIGER, liger_loss),
    ("liger_kernel.transformers.fused_linear_cross_entropy", LIGER, liger_loss),
)


def share_fused_heads() -> None:
    """Replace each function whose library has been imported by a `FusedHead`."""
    for module, name, on_rows in HEADS:
        ordinary = getattr(sys.modules.get(module), name, None)
        if ordinary is not None and not isinstance(ordinary, FusedHead):
            setattr(sys.modules[module], name, FusedHead(ordinary, on_rows))
