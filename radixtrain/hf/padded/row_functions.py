"""Functions that compute with the table of a `SpreadRows` in place of the whole tensor.

A function of each row (the head, a scale, a cast, a softmax) is computed on the rows of the table, and a view of the
batch is a view of `place_rows`. Cross-entropy, and the log-probability of a label, are one number for each place.

Functions of other libraries that have the head and the loss in one are replaced in the modules that call them. TRL's
log-probabilities are computed once for equal rows and labels; Liger's loss gets every place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from radixtrain.hf.padded.places import check_gradient_at, refuse_counted
from radixtrain.hf.token_losses import for_token_loss
from radixtrain.kernels.rows import gather_rows
from radixtrain.loss import logits_cross_entropy, logits_logprobs

if TYPE_CHECKING:
    from radixtrain.hf.padded.spread_rows import SpreadRows
PLAIN = int | float | torch.dtype | None
MIN_SAVING = 1.1  # rows requested / rows computed: below this, the copies cost more than the head saves
Others: TypeAlias = tuple[Any, ...]
Named: TypeAlias = Mapping[str, Any]
# What func(x, *others, **named) is; NotImplemented for a call that needs the whole tensor.
Rule: TypeAlias = Callable[["SpreadRows", Any, Others, Named], Any]


def _by_row(x: SpreadRows, func: Any, others: Others, named: Named) -> Any:
    """Compute each number independently, or with a Python number. A few rows of a large table are not worth it."""
    if func is Tensor.to and not named and others in ((x.table.dtype,), (x.table.device,)):
        return x
    if any(not isinstance(each, PLAIN) for each in (*others, *named.values())):
        return NotImplemented
    if x.asks_few:
        return NotImplemented
    table = func(x.table, *others, **named)
    if table is x.table:
        return x
    x.mark_read()
    return x.with_table(table)


def _given(names: Sequence[str], others: Others, named: Named) -> dict[str, Any]:
    """Return the arguments by name."""
    return {**dict(zip(names, others, strict=False)), **named}


def _is_last(x: SpreadRows, dim: object) -> bool:
    """Return whether the axis is that of the numbers of a row."""
    return dim in (-1, len(x.shape) - 1)


def _log_softmax(x: SpreadRows, func: object, others: Others, named: Named) -> Any:
    given = _given(("dim", "?"), others, named)
    if "?" in given or not _is_last(x, given.get("dim")):
        return NotImplemented
    return _by_row(x, func, (), {**given, "dim": -1})


def _linear(x: SpreadRows, func: Callable[..., Any], others: Others, named: Named) -> Any:
    """Compute the rows that are needed, once each."""
    num_places, num_rows = x.place_rows.size, len(x.asked_rows)
    weight: Any = others[0] if others else named.get("weight")
    if num_places < MIN_SAVING * num_rows or getattr(weight, "ndim", 0) != 2:
        return NotImplemented
    x.report.count_head(num_places, num_rows)
    x.mark_read()
    asked = x.with_asked_rows()
    return asked.with_table(func(asked.table, *others, **named))


def _view(x: SpreadRows, func: Callable[..., Any], others: Others, named: Named) -> Any:
    """Return a view whose last axis is that of x, or a copy of all of x in the same order; in the modes of x."""
    if type(x.modes).now() != x.modes:
        return NotImplemented
    if any(isinstance(each, Tensor | torch.dtype) for each in tree_leaves((others, named))):
        return _masked(x, *others) if func is Tensor.__getitem__ else NotImplemented
    shaped, width = _shaped(x, func, others, named), x.shape[-1]
    if shaped is x.shaped:
        return x
    if shaped is NotImplemented or not shaped.numel() or shaped.shape[-1:] != (width,):
        return NotImplemented
    if not shaped._is_view():
        x.mark_read()
        return x.at(x.place_rows.reshape(shaped.shape[:-1])) if func in COPIES else NotImplemented
    strides = [0 if size == 1 else step for size, step in zip(shaped.shape, shaped.stride(), strict=True)]
    start = shaped.storage_offset()
    if strides.pop() != 1 or any(step % width for step in (*strides, start)):
        return NotImplemented  # not of whole rows
    inside = x.memory.place_rows.reshape(-1)[start // width :]
    steps = [step // width * inside.itemsize for step in strides]
    return x.at(np.lib.stride_tricks.as_strided(inside, shaped.shape[:-1], steps, writeable=False).copy(), shaped)


def _shaped(x: SpreadRows, func: Callable[..., Any], others: Others, named: Named) -> Any:
    """Return the shape of the ordinary result, without its numbers; NotImplemented for an error."""
    with x.modes._replace(grad=False, inference=False).entered():
        try:
            return func(x.shaped, *others, **named)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return NotImplemented


def _masked(x: SpreadRows, mask: object) -> Any:
    """Copy the places of a mask, as TRL takes them on a GPU. torch itself waits for the device here, too."""
    if not _is_plain(mask) or mask.dtype != torch.bool or mask.shape != x.place_rows.shape:
        return NotImplemented
    index = x.place_rows[mask.cpu().numpy()]
    if not index.size:
        return NotImplemented
    x.mark_read()
    return x.at(index)


def _is_plain(x: object) -> TypeGuard[Tensor]:
    """Return whether x is a plain tensor: torch's own class, or a fake of it."""
    return type(x) is Tensor or hasattr(x, "fake_mode")


def _gather(x: SpreadRows, func: object, others: Others, named: Named) -> Any:
    """Select some numbers of each row, such as the log-probabilities of labels."""
    given = _given(("dim", "index"), others, named)
    index, width = given.get("index"), x.shape[-1]
    if given.keys() != {"dim", "index"} or not _is_last(x, given["dim"]) or not _is_plain(index):
        return NotImplemented
    if index.dtype != torch.int64 or index.ndim != len(x.shape) or index.shape[:-1] != x.place_rows.shape:
        return NotImplemented
    is_outside = (index < 0) | (index >= width)
    if index.device.type == "cpu" and is_outside.any():
        return NotImplemented  # torch's own error; another device has an assertion
    x.mark_read()
    found = x.table[x.rows[:, None], index.masked_fill(is_outside, width).flatten(0, -2)]
    check_gradient_at(x.padding, found)
    return found.view(index.shape)


def _cross_entropy(x: SpreadRows, func: object, others: Others, named: Named) -> Any:
    given = _given(("target", "weight"), others, named)
    target, reduction, ignored = given.get("target"), given.get("reduction", "mean"), given.get("ignore_index", -100)
    if not _is_plain(target) or target.dtype != torch.int64 or target.shape != x.place_rows.shape:
        return NotImplemented
    options = [given.get(name) for name in ("weight", "size_average", "reduce")]
    if target.ndim != 1 or any(each is not None for each in options) or given.get("label_smoothing"):
        return NotImplemented
    if reduction not in ("mean", "sum", "none"):
        return NotImplemented
    x.mark_read()
    rows = x.with_asked_rows() if x.asks_few else x
    counted = target != ignored
    labels = target.masked_fill(~counted, 0)
    table = rows.table
    if torch.is_autocast_enabled(table.device.type):  # it is one of those that autocast computes in float32
        table = table.to(torch.promote_types(table.dtype, torch.float32))
    if reduction == "none":
        losses = -logits_logprobs(table, labels, rows.rows)
        check_gradient_at(rows.padding, losses)
        return losses.masked_fill(~counted, 0).to(table.dtype)
    loss = logits_cross_entropy(table, labels, rows.rows, counted)
    refuse_counted(rows.padding, counted, loss)
    return (loss / counted.sum() if reduction == "mean" else loss).to(table.dtype)


def _named(*names: str) -> list[Any]:
    """Return the functions of these names, of Tensor, torch and torch.nn.functional."""
    return [getattr(room, name) for name in names for room in (Tensor, torch, functional) if hasattr(room, name)]


COPIES = {*_named("reshape", "flatten"), Tensor.contiguous}
VIEWS = _named("view", "__getitem__")
NUMBERS = _named("float", "double", "to", "mul", "__mul__", "__rmul__", "div", "__truediv__", "tanh")
RULES: dict[Any, Rule] = {
    **dict.fromkeys(NUMBERS, _by_row),
    **dict.fromkeys(_named("log_softmax"), _log_softmax),
    **dict.fromkeys([*COPIES, *VIEWS], _view),
    **dict.fromkeys(_named("gather"), _gather),
    functional.linear: _linear,
    functional.cross_entropy: _cross_entropy,
}


class FusedHead:
    """Replaces a head and its loss in one autograd function of another library, to which torch gives whole tensors.

    It takes hidden rows, the matrix of the head and labels, and is known to be a loss over tokens.
    """

    def __init__(self, ordinary: Any):
        self.ordinary = ordinary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ordinary, name)

    def apply(self, hidden: Tensor, *others: Any) -> Any:
        return self.ordinary.apply(for_token_loss(hidden), *others)


class LogProbs(FusedHead):
    """Scores each pair of a row and a label once. Without Triton TRL scores every place of the batch."""

    def apply(self, hidden: Any, *others: Any) -> Any:
        if not hasattr(hidden, "place_rows") or not hidden.is_lazy:
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
