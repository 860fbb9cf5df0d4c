"""Whether the recurrent mixers of a model can fork, which is part of its trial (`model.py`).

A mixer that starts from a state has to read it and return its gradient, and the gradient of its final state. Not all
do: Mamba's first version does not read it, and a kernel for generation may have no gradient. Such a mixer is still
exact on whole sequences.

In 16 bits the outputs of a model do not show that: the state of fresh weights, or one that fades fast, is small
beside the rounding of all layers. So each mixer runs by itself too. What its rows after the forks give to those before
them comes through the states alone: where a state is lost, that gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.errors import first_line
from radixtrain.hf.recurrent import each_tensor, run_on_tree
from radixtrain.tree.runs import RunLayout

ALLOWED = 0.1  # relative error of the gradient, of which rounding in bfloat16 makes 0.01


def why_no_fork(
    mixer: nn.Module, given: Mapping[str, Any], forked: RunLayout, whole: RunLayout, is_above: Tensor
) -> str | None:
    """Say why runs of a mixer cannot start from a state; None if they can.

    given: its arguments on unique rows, the hidden rows first. forked, whole: the runs of a batch with forks and
    without. is_above: the rows before its forks, (U,).
    """
    name = type(mixer).__name__
    try:
        found, expected = (_gradient_above_forks(mixer, given, runs, is_above) for runs in (forked, whole))
    except Exception as error:  # a kernel may raise anything
        return f"{name} raises {type(error).__name__}: {first_line(error)}"
    if not expected.any():
        return f"the state of {name} does not show"
    is_lost = expected.any(dim=-1) & ~found.any(dim=-1)
    if is_lost.any() or not (found - expected).norm() <= ALLOWED * expected.norm():
        return f"the gradient of rows before a fork does not come through the state of {name}"
    return None


@torch.enable_grad()
def _gradient_above_forks(mixer: nn.Module, given: Mapping[str, Any], runs: RunLayout, is_above: Tensor) -> Tensor:
    """Return the gradient of the rows before the forks, (rows, channels), of a sum of the outputs after them."""
    inputs = {name: each_tensor(Tensor.detach, len(is_above), value) for name, value in given.items()}
    rows = next(iter(inputs.values())).requires_grad_()
    output = run_on_tree(mixer, mixer.forward, inputs, runs)
    outputs = output if isinstance(output, tuple) else (output,)
    below = torch.cat([each[0, ~is_above].flatten() for each in outputs if each is not None])
    weights = torch.arange(len(below), device=below.device).sin()
    (gradient,) = torch.autograd.grad((below * weights).sum(), rows)
    return gradient[0, is_above].float()
