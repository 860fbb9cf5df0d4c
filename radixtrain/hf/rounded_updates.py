"""Warns once if an optimizer changes weights of 16 bits, which round small updates away.

A model does not know its optimizer, and its own weights do not tell: under DeepSpeed and FSDP's mixed precision they
have 16 bits, and the optimizer changes float32 copies. So the weights of the optimizer itself are looked at.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

logger = logging.getLogger(__name__)


@cache
def watch_steps() -> None:
    """Look at the weights of whatever optimizer takes a step in this process. `restore_model` does not end it."""
    register_optimizer_step_pre_hook(warn_of_rounding)


def warn_of_rounding(optimizer: Optimizer, *_: object) -> None:
    """Warn if the optimizer changes weights of 16 bits. Takes 20 us for 300 weights."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    for dtype in {weight.dtype for weight in weights if weight.grad is not None}:  # frozen ones do not change
        if dtype.itemsize == 2:
            _warn(dtype)


@cache
def _warn(dtype: torch.dtype) -> None:
    logger.warning(
        "the optimizer changes weights in %s: unless it keeps float32 copies, an update of less than %.2f %% of a "
        "weight is rounded away. Load the model with dtype=torch.float32 and compute in 16 bits by autocast "
        "(bf16=True; in fit model.dtype: float32, trainer.precision: bf16-mixed), or take an optimizer that keeps them",
        dtype,
        25 * torch.finfo(dtype).eps,  # a quarter of it may move a number, less never does
    )
