"""What kernels and losses share: the dtype of sums, elements as one kernel, the refusal of gradients that do not exist.

`fused`: torch.compile on CUDA, the operators one by one elsewhere.

`first_order` refuses second derivatives, and `refuse_batched` several gradients at once.

torch's `once_differentiable` does not: it raises only if the second pass runs through its node, from which no
weight is reached. `torch.autograd.grad(..., weights)` leaves such nodes out, and `grad` without a graph of its own is
not marked. Both return a gradient without its largest term.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixtrain.errors import UserError

logger = logging.getLogger(__name__)


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which numbers of x are added: float32, or wider if x is."""
    return torch.promote_types(x.dtype, torch.float32)


def fused(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call a function of tensors. On CUDA its first call compiles it, in seconds, for any size of the first axis.

    The other axes are constants of a model. Only a row of known length is summed while its maximum is found.
    """
    if tensors[0].is_cuda and not torch.compiler.is_compiling():
        function = _compiled(function)
        for x in tensors:
            torch._dynamo.mark_static(x, [*range(1, x.ndim)])
    return function(*tensors)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, if torch can here.

    Not with `fullgraph`: torch compiles nothing under a dispatch mode such as `FlopCounterMode`, and would raise there.
    """
    return function if _why_not() else torch.compile(function, dynamic=True)


@cache
def _why_not() -> str:
    """Say once why torch.compile finds no compiler for this GPU; empty if it finds one."""
    missing = {
        "Triton": importlib.util.find_spec("triton") and torch.cuda.get_device_capability() >= (7, 0),
        "a C compiler": shutil.which(os.environ.get("CC", "gcc")),
        "Python's headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    reason = next((name for name, found in missing.items() if not found), "")
    if reason:
        logger.warning("loss and merges run uncompiled on this GPU, which is slower: %s is missing", reason)
    return reason


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
