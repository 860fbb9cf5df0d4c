"""A mixer on the runs of a tree: its own `forward`, called once for each `RunCall`.

A state goes from one call to the next through the argument for Hugging Face's cache (`states.py`), so the formula is
the mixer's own, and so are its kernels. U unique rows; R runs of length L in a call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.hf.recurrent.states import ForkedStates, States
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.runs import RunCall, RunLayout

__all__ = ["arguments_by_name", "cache_argument", "run_on_tree"]

Forward = Callable[..., Any]
CACHE_ARGUMENTS = ("cache_params", "past_key_values")
MASK = re.compile("mask")  # in the name of an argument: runs have no padding that a mask would hide from an output


def run_on_tree(module: nn.Module, forward: Forward, given: Mapping[str, Any], runs: RunLayout) -> Any:
    """What a mixer returns for U unique rows, each computed after the rows above it on its path.

    module: the mixer. forward: its `forward`, or what stands in for that.
    given: its arguments by name, as the layer passes them. Tensors (1, U, ...), also in tuples, are cut into runs, a
        mask becomes None, anything else is passed as it is.
    runs: of the batch, on the device of the rows.

    Returns what the mixer returns, one tensor or a tuple, each (1, U, ...) in the dtype that the mixer gives it.
    """
    cache = cache_argument(module)
    given = {name: None if MASK.search(name) else value for name, value in given.items()}
    kept: list[States] = []
    outputs = []
    rows, parents = _split(runs)
    for call, rows_of_call, parents_of_call in zip(runs.calls, rows, parents, strict=True):
        states = ForkedStates(_past(kept, call, parents_of_call)) if call.keeps or call.sources else None
        inputs = {name: _rows_of(value, rows_of_call, call, len(runs.places)) for name, value in given.items()}
        outputs.append(forward(**{**inputs, cache: states}))
        kept.append(states.final if states is not None and call.keeps else {})
    return _joined(outputs, runs)


def _split(runs: RunLayout) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The rows and the parents of each call."""
    from_states = [sum(number for _, number in call.sources) for call in runs.calls]
    return runs.rows.split([call.num_runs * call.length for call in runs.calls]), runs.parents.split(from_states)


def _past(kept: Sequence[States], call: RunCall, parents: Tensor) -> States:
    """The states that the runs of a call start from. `gather_rows` sums the gradients of children in their order."""
    numbers = parents.split([number for _, number in call.sources])
    past: dict[tuple[str, int], list[Tensor]] = {}
    for (source, _), places in zip(call.sources, numbers, strict=True):
        for kind, states in kept[source].items():
            past.setdefault(kind, []).append(gather_rows(states, places))
    return {kind: torch.cat(states) if len(states) > 1 else states[0] for kind, states in past.items()}


def _rows_of(value: Any, rows: Tensor, call: RunCall, num_rows: int) -> Any:
    """An argument of the mixer for the runs of a call: tensors (1, U, ...) -> (R, L, ...), anything else as it is."""
    if isinstance(value, Tensor) and value.shape[:2] == (1, num_rows):
        return gather_rows(value[0], rows).unflatten(0, (call.num_runs, call.length))
    if isinstance(value, tuple):
        return tuple(_rows_of(each, rows, call, num_rows) for each in value)
    return value


def _joined(outputs: Sequence[Any], runs: RunLayout) -> Any:
    """The outputs of all calls at the places of the unique rows; a mixer may return several tensors."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(each, runs) for each in zip(*outputs, strict=True))
    if first is None:
        return None
    flat = torch.cat([output.flatten(0, 1) for output in outputs])
    return gather_rows(flat, runs.places)[None]


def cache_argument(module: nn.Module) -> str:
    """The name of the argument by which a mixer takes Hugging Face's cache. UserError if it has no such argument."""
    return next(name for name in CACHE_ARGUMENTS if name in _arguments_of(module))


def _arguments_of(module: nn.Module) -> list[str]:
    """The arguments of a mixer's `forward`, as the first class names them that names the cache.

    A subclass may pass on what it gets by `*args` and `**kwargs`.
    """
    for each in type(module).__mro__:
        own = vars(each).get("forward")
        names = list(inspect.signature(own).parameters) if own else []
        if not set(CACHE_ARGUMENTS).isdisjoint(names):
            return names
    raise UserError(
        f"{type(module).__name__} has a recurrent state, and its forward does not name the cache that it gets "
        f"({' or '.join(CACHE_ARGUMENTS)}), so its state cannot fork; name it, or train without sharing (fit: dedup: "
        f"false)"
    )


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the mixer, without the call of the batch, which its runs stand for."""
    names = _arguments_of(module)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("radix_call", None)
    return given
