"""Head and loss in one function of another library, known to be a loss over tokens: TRL's log-probabilities, Liger's.

These functions take hidden rows, the matrix of the head and labels, and are autograd functions, to which torch gives
whole tensors. So ours replace them, in the modules that call them. TRL's is computed once for equal rows and labels.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from radixtrain.hf.padded.places import check_gradient_at
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.hf.token_losses import for_token_loss
from radixtrain.kernels.rows import gather_rows


class FusedHead:
    """Replaces an autograd function of hidden rows."""

    def __init__(self, ordinary: Any):
        self.ordinary = ordinary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ordinary, name)

    def apply(self, hidden: Tensor, *others: Any) -> Any:
        return self.ordinary.apply(for_token_loss(hidden), *others)


class LogProbs(FusedHead):
    """Scores each pair of a row and a label once. Without Triton TRL scores every place of the batch."""

    def apply(self, hidden: Tensor, *others: Any) -> Any:
        if type(hidden) is not SpreadRows or not hidden.is_lazy:
            return super().apply(hidden, *others)
        weight, bias, labels, *options = others
        vocab_size = len(weight)
        kinds = labels.clamp(-1, vocab_size) + 1  # TRL has a number for "not a token", too
        pairs, back = (hidden.rows * (vocab_size + 2) + kinds).unique(return_inverse=True)
        rows, labels = gather_rows(hidden.table, pairs // (vocab_size + 2)), pairs % (vocab_size + 2) - 1
        hidden.report.count_head(len(back), len(pairs))
        hidden.mark_read()
        found = self.ordinary.apply(rows, weight, bias, labels, *options)
        return tuple(None if each is None else _placed(hidden, each, back) for each in found)


def _placed(hidden: SpreadRows, values: Tensor, back: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values[back]
    placed = gather_rows(values, back)
    check_gradient_at(hidden.padding, placed)
    return placed


LIGER = "LigerFusedLinearCrossEntropyFunction"
HEADS = (
    ("trl.trainer.utils", "_ChunkedLogProbFunction", LogProbs),
    ("liger_kernel.transformers.functional", LIGER, FusedHead),
    ("liger_kernel.transformers.fused_linear_cross_entropy", LIGER, FusedHead),
)


def share_fused_heads() -> None:
    """Replace each function whose library has been imported by a `FusedHead`."""
    for module, name, fused_head in HEADS:
        ordinary = getattr(sys.modules.get(module), name, None)
        if ordinary is not None and not isinstance(ordinary, FusedHead):
            setattr(sys.modules[module], name, fused_head(ordinary))
