"""Refuses second derivatives, and several gradients at once, of autograd functions that compute only the first.

torch's `once_differentiable` does not: it raises only if the second pass runs through its node, from which no
weight is reached. `torch.autograd.grad(..., weights)` leaves such nodes out, and `grad` without a graph of its own is
not marked. Both return a gradient without its largest term.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from radixtrain.errors import UserError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function. It raises UserError in a pass with `create_graph=True`."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UserError(
                "create_graph=True requests a gradient of a gradient (a Hessian, a gradient penalty, MAML), which "
                "shared prefixes do not have: call restore_model(model) before, or leave create_graph out"
            )
        return backward(ctx, *gradients)

    return checked


def refuse_batched(gradient: Tensor) -> None:
    """Raise UserError for several gradients as one tensor, over which torch maps: nothing in them can be looked at."""
    if torch._C._functorch.is_legacy_batchedtensor(gradient):
        raise UserError(
            "is_grads_batched=True (torch.autograd.functional: vectorize=True) asks for several gradients in one pass, "
            "which shared prefixes do not have: call restore_model(model) before, or ask for one after the other"
        )
