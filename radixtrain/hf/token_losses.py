"""Which losses may train a batch of a `RadixCollator`: only those known to be a sum over tokens.

Such a batch has the labelled predictions of each sequence in a row of its own, `[B, P / B, V]`. A sum over these,
whatever it is divided by, is the ordinary loss, and so is a mean for each row. A loss that reads anything else (tokens
without a label, lengths, places in a row) is a different one, and no number shows it. So the hidden rows that predict
refuse a gradient, unless it comes from a loss of this list that reads all of them:

- the model's own, by `ForCausalLMLoss` of transformers;
- a `FusedHead`, of TRL or Liger (`padded/row_functions.py`);
- whatever the collator vouches for (`token_loss`, `merge_labels`).

Under `torch.compile` nothing is watched. A loss finds the rows that it reads through the graph, so that each call is
judged by its own loss. Anything else computed from the same logits adds to the gradient there, and is refused:

    hidden rows, watched  ->  head  ->  logits  ->  the same, for a loss  ->  ForCausalLMLoss  ->  loss
                                              ->  something of the user's
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import update_wrapper
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from radixtrain.errors import UserError
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.radix_inputs import RADIX

UNKNOWN = (
    "this gradient comes from a loss that radixtrain does not recognise as a sum over tokens: your own (compute_loss, "
    "compute_loss_func, another loss_function), a term added to the model's, the model's on a part of the logits, or "
    "that of a model that is not shared, around the backbone of a shared one: call share_prefixes with what you train. "
    "A batch of RadixCollator has logits only where a label is predicted, so a loss that reads any other would be a "
    "different one. If yours is a sum over labels, whatever it is divided by, or a mean of such sums over sequences, "
    "say so: RadixCollator(token_loss=True). For any other loss use share_prefixes(model) and your own collator"
)
MAX_NODES = 200  # of a graph between hidden rows and a loss: a head, adapters on it, a scale, a soft-cap


class LossWatch:
    """The gradient that a loss over tokens gives the rows of one call, and whether that is their only gradient.

    shapes: of the places that a loss reads: all, also flat, or flat those that have a label.
    leaf: the rows, if they need a gradient only to be watched; None if something that they depend on is trained.
    """

    leaf: Tensor | None = None
    known: Tensor | None = None
    is_known = False

    def __init__(self, place_rows: IntArray) -> None:
        self.shapes = {place_rows.shape, (place_rows.size,), (int((place_rows >= 0).sum()),)}

    def compare(self, grad: Tensor) -> None:
        """Compare the gradient that arrives with the one held: torch makes a new tensor if it adds another."""
        self.is_known, self.known = grad is self.known, None


@torch.compiler.disable  # the watch is new in every call
def watched(rows: Tensor, place_rows: IntArray) -> Tensor:
    """Return the rows, whose backward pass then raises UserError for a gradient of an unknown loss.

    rows: (R, D). place_rows: of the `RadixInputs`.
    """
    watch = LossWatch(place_rows)
    if not rows.requires_grad:
        rows = watch.leaf = rows.detach().requires_grad_()
    return _Watched.apply(rows, watch)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, watch: LossWatch) -> Tensor:
        ctx.watch = watch
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        is_known, ctx.watch.is_known = ctx.watch.is_known, False
        if not is_known:
            raise UserError(UNKNOWN)
        return grad, None


@torch.compiler.disable  # reads the graph
def for_token_loss(source: Tensor) -> Tensor:
    """Return the tensor for a loss over tokens: its source rows accept that gradient if they get no other."""
    watch = None if hasattr(source, "place_rows") else _watch_above(source)  # a `SpreadRows` is of an ordinary batch
    if watch is None or tuple(source.shape[:-1]) not in watch.shapes:
        return source
    if watch.leaf is not None and all(getattr(node, "variable", watch.leaf) is watch.leaf for node in _nodes(source)):
        return source.detach()  # no weight is trained: torch's own error, as for an ordinary batch
    source.register_hook(watch.compare)
    return _ForTokenLoss.apply(source, watch)


class _ForTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, watch: LossWatch) -> Tensor:
        ctx.watch = watch
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.watch.known = grad
        return grad, None


def _watch_above(source: Tensor) -> LossWatch | None:
    """Find the watch of the nearest rows that a tensor was computed from; None if there are none."""
    watches = (getattr(node, "watch", None) for node in islice(_nodes(source), MAX_NODES))
    return next((watch for watch in watches if isinstance(watch, LossWatch)), None)


def _nodes(source: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph from which a tensor was computed, the nearest first."""
    waiting, seen = deque[Any]([source.grad_fn]), set[Any]([None])
    while waiting:
        node = waiting.popleft()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(map(itemgetter(0), node.next_functions))


class TokenLoss:
    """Replaces the `loss_function` of a model. ordinary: transformers' own."""

    def __init__(self, ordinary: Callable[..., Tensor]) -> None:
        update_wrapper(self, ordinary)
        self.ordinary = ordinary

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        if RADIX in kwargs:  # a program changes the labels, and does not know of shift_labels
            kwargs = {**kwargs, "shift_labels": None}
        if torch.compiler.is_compiling():  # where no rows are watched, and a look at the graph would break it
            return self.ordinary(*args, **kwargs)
        if "logits" in kwargs:
            return self.ordinary(*args, **{**kwargs, "logits": for_token_loss(kwargs["logits"])})
        return self.ordinary(for_token_loss(args[0]), *args[1:], **kwargs)

    @staticmethod
    def install(model: Any) -> None:
        """Wrap the loss of a model, unless it was given another one."""
        if model.loss_function is ForCausalLMLoss:
            model.loss_function = TokenLoss(ForCausalLMLoss)

    @staticmethod
    def remove(model: Any) -> None:
        """Give a model its own loss back."""
        for name in [name for name, value in vars(model).items() if isinstance(value, TokenLoss)]:
            delattr(model, name)
            if model.loss_function is not ForCausalLMLoss:  # another program had set it before
                model.loss_function = ForCausalLMLoss
