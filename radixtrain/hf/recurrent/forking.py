"""Whether a mixer can fork: tried on a few random rows, with the kernels that it runs with.

A mixer that starts from a state has to read it and return its gradient, and the gradient of its final state. Not
all do: Mamba's first version does not read it, and a kernel for generation may have no gradient. A mixer
that cannot fork is still exact on whole sequences.

The weights are random as well: with fresh ones, or with those of a mixer whose state fades fast, a lost state may not
show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from radixtrain.hf.dropout import without_dropout
from radixtrain.hf.recurrent.running import run_on_tree
from radixtrain.tree.runs import RunCall, RunLayout

ABOVE, BELOW = 12, 5  # rows before the fork and of each of two runs after it; more before it than a convolution is wide
ALLOWED = 0.1  # relative error of a row: without a state or its gradient it is about 1, by rounding in bfloat16 0.01
NEGLIGIBLE = 1e-3  # of the largest row: smaller ones may be rounding
SCALE = 0.2  # of vectors, such as the logarithms of decays; matrices have the usual 1 / sqrt(inputs)
LOST = {"gradient": "before a fork does not come through the state", "value": "after a fork ignores the state"}
REPLACED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # weights that are not quantized


def why_it_cannot_fork(module: nn.Module, forward: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Say why runs of this mixer cannot start from a state; empty if they can, None if zero gradients leave it open.

    module: the mixer; its weights are replaced while this runs. forward: its `forward`.
    given: its arguments on unique rows, the hidden rows first; random ones take the place of tensors (1, U, ...).
    """
    device = next(iter(given.values())).device
    with _unnoticed(), _random_weights(module, device), without_dropout(module, ()):
        on_tree, by_itself = (_try(module, forward, given, runs) for runs in (FORKED, WHOLE))
    for result in (on_tree, by_itself):
        if isinstance(result, str):
            return result
    if not by_itself["gradient"].any():
        return None
    wrong = [name for name in on_tree if not _agree(on_tree[name], by_itself[name])]
    return f"the {wrong[0]} of rows {LOST[wrong[0]]}" if wrong else ""


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether all rows are equal but for rounding. False for NaN."""
    size, off = expected.norm(dim=-1), (found - expected).norm(dim=-1)
    return bool(((off <= ALLOWED * size) | (size <= NEGLIGIBLE * size.max())).all())


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Compute with gradients, also under `no_grad`, and unnoticed by contexts outside.

    Activation checkpointing would count the saved tensors, and does not run this again. Autocast would keep the 16-bit
    copies of the random weights.
    """
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_same, _same):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


@contextmanager
def _random_weights(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Set weights of order one, then the mixer's own again. Gradients and the global random state stay."""
    generator = torch.Generator(device).manual_seed(1)
    kinds = (Tensor, nn.Parameter)  # subclasses are sharded or quantized, and keep their values
    own = [
        (parameter, parameter.data)
        for parameter in module.parameters()
        if type(parameter) in kinds and parameter.dtype in REPLACED and parameter.device == device
    ]
    try:
        for parameter, weights in own:
            scale = SCALE if weights.ndim < 2 else weights[0].numel() ** -0.5
            noise = torch.randn(weights.shape, generator=generator, device=device, dtype=torch.float32)
            parameter.data = (noise * scale).to(weights.dtype)
        yield
    finally:
        for parameter, weights in own:
            parameter.data = weights


def _try(module: nn.Module, forward: Callable[..., Any], given: Mapping[str, Any], runs: RunLayout) -> Any:
    """Call `_rows_around_fork`, or return the first line of the error that it ends with."""
    try:
        return _rows_around_fork(module, forward, given, runs)
    except Exception as error:  # a kernel may raise anything
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _rows_around_fork(
    module: nn.Module, forward: Callable[..., Any], given: Mapping[str, Any], runs: RunLayout
) -> dict[str, Tensor]:
    """Return the values of the rows after the fork and the gradients of those before it, (rows, channels).

    The gradient is that of a random sum of the values.
    """
    hidden = next(iter(given.values()))
    generator = torch.Generator(hidden.device).manual_seed(0)
    inputs = {name: _random_like(value, hidden.shape[1], generator) for name, value in given.items()}
    rows = next(iter(inputs.values())).requires_grad_()
    output = run_on_tree(module, forward, inputs, runs.to(hidden.device))
    outputs = output if isinstance(output, tuple) else (output,)
    below = torch.cat([_wide(each[0, ABOVE:]).flatten(1) for each in outputs if each is not None], dim=-1)
    total = (below * torch.randn(below.shape, generator=generator, device=below.device)).sum()
    (gradient,) = torch.autograd.grad(total, rows)
    return {"value": below.detach(), "gradient": _wide(gradient[0, :ABOVE])}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _random_like(value: object, num_rows: int, generator: torch.Generator) -> Any:
    """Draw random rows for an argument: tensors (1, U, ...) -> (1, 22, ...), anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_random_like(each, num_rows, generator) for each in value)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, num_rows) or not value.is_floating_point():
        return value
    shape = 1, ABOVE + 2 * BELOW, *value.shape[2:]
    return torch.randn(shape, generator=generator, device=value.device, dtype=value.dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _runs(calls: tuple[RunCall, ...], rows: list[int], parents: list[int]) -> RunLayout:
    places = [rows.index(row) for row in range(ABOVE + 2 * BELOW)]
    return RunLayout(
        calls=calls,
        rows=torch.tensor(rows, device="cpu"),
        places=torch.tensor(places, device="cpu"),
        parents=torch.tensor(parents, dtype=torch.int64, device="cpu"),
    )


TRUNK = list(range(ABOVE))
ONE, OTHER = [ABOVE + n for n in range(BELOW)], [ABOVE + BELOW + n for n in range(BELOW)]
WHOLE = _runs((RunCall(2, ABOVE + BELOW, 0, ()),), [*TRUNK, *ONE, *TRUNK, *OTHER], [])
FORKED = _runs((RunCall(1, ABOVE, 1, ()), RunCall(2, BELOW, 0, ((0, 2),))), [*TRUNK, *ONE, *OTHER], [0, 0])
