"""Whether the recurrent mixers of a model can fork, which is part of its trial (`model.py`).

A mixer that starts from a state has to read it and return its gradient, and the gradient of its final state. Not all
do: Mamba's first version does not read it, and a kernel for generation may have no gradient. Such a mixer is still
exact on whole sequences.

In 16 bits the outputs of a model do not show that: the state of fresh weights, or one that fades fast, is small
beside the rounding of all layers. So each mixer is tried by itself, on random rows and with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.hf.recurrent.running import each_tensor, run_on_tree
from radixtrain.tree.runs import RunLayout

ALLOWED = 0.1  # relative error of a row: without a state or its gradient it is about 1, by rounding in bfloat16 0.01
NEGLIGIBLE = 1e-3  # of the largest row: smaller ones may be rounding
SCALE = 0.2  # of vectors, such as the logarithms of decays; matrices have the usual 1 / sqrt(inputs)
REPLACED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # weights that are not quantized
Rows = tuple[Tensor, Tensor]


def why_no_fork(
    mixer: nn.Module, given: Mapping[str, Any], forked: RunLayout, whole: RunLayout, is_above: Tensor
) -> str | None:
    """Say why runs of a mixer cannot start from a state; None if they can. Its weights are replaced while this runs.

    given: its arguments on unique rows, the hidden rows first; random ones take the place of tensors (1, U, ...).
    forked, whole: the runs of a batch with forks and without. is_above: the rows before its forks, (U,).
    """
    name = type(mixer).__name__
    try:
        with torch.enable_grad(), _random_weights(mixer, is_above.device):
            (value, gradient), (expected, its_gradient) = (
                _rows_around_forks(mixer, given, runs, is_above) for runs in (forked, whole)
            )
    except Exception as error:  # a kernel may raise anything
        return f"{name} raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not its_gradient.any():
        return f"the state of {name} does not show"
    if not _agree(value, expected):
        return f"the value of rows after a fork ignores the state of {name}"
    if not _agree(gradient, its_gradient):
        return f"the gradient of rows before a fork does not come through the state of {name}"
    return None


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether all rows are equal but for rounding. False for NaN."""
    size, off = expected.norm(dim=-1), (found - expected).norm(dim=-1)
    return bool(((off <= ALLOWED * size) | (size <= NEGLIGIBLE * size.max())).all())


@contextmanager
def _random_weights(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Set weights of order one, then the mixer's own again. Gradients and the global random state stay."""
    generator = torch.Generator(device).manual_seed(1)
    kinds = (Tensor, nn.Parameter)  # subclasses are quantized, and keep their values
    own = [
        (parameter, parameter.data)
        for parameter in module.parameters()
        if type(parameter) in kinds and parameter.dtype in REPLACED and parameter.device == device
    ]
    torch.clear_autocast_cache()  # of 16-bit copies
    try:
        for parameter, weights in own:
            scale = SCALE if weights.ndim < 2 else weights[0].numel() ** -0.5
            noise = torch.randn(weights.shape, generator=generator, device=device, dtype=torch.float32)
            parameter.data = (noise * scale).to(weights.dtype)
        yield
    finally:
        for parameter, weights in own:
            parameter.data = weights
        torch.clear_autocast_cache()


def _rows_around_forks(mixer: nn.Module, given: Mapping[str, Any], runs: RunLayout, is_above: Tensor) -> Rows:
    """Return the values of the rows after the forks and the gradients of those before them, (rows, channels).

    The gradient is that of a random sum of the values.
    """
    generator = torch.Generator(is_above.device).manual_seed(0)

    def random(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)

    inputs = {name: each_tensor(random, len(is_above), value) for name, value in given.items()}
    rows = next(iter(inputs.values())).requires_grad_()
    output = run_on_tree(mixer, mixer.forward, inputs, runs)
    outputs = output if isinstance(output, tuple) else (output,)
    below = torch.cat([_wide(each[0, ~is_above]).flatten(1) for each in outputs if each is not None], dim=-1)
    total = (below * torch.randn(below.shape, generator=generator, device=below.device)).sum()
    (gradient,) = torch.autograd.grad(total, rows)
    return below.detach(), _wide(gradient[0, is_above])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
