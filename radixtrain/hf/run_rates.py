"""What a recurrent layer costs on a machine, measured: the `RunCost` by which its forks are chosen.

The mixers of the model run on a few small trees, forward and backward, with the kernels that they have. The rates are
fitted to the times as those of attention are (`radixtrain/hf/rates.py`). Kernels pad each run to chunks, of a
length that they do not report: the one that fits best is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.hf.rates import Layer, fastest, non_negative_fit
from radixtrain.hf.recurrent.forking import why_it_cannot_fork
from radixtrain.hf.recurrent.running import run_on_tree
from radixtrain.tree.runs import RunCost, RunLayout, RunTable, runs_of_segments

__all__ = ["can_fork", "measured_run_cost", "mixers_key"]

CHUNKS = (64, 128, 256)  # rows; of the kernels in transformers and of those that it calls
KERNELS = ("transformers", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "kernels")  # that a mixer may run
# Rows that all runs continue, runs, rows of each: short runs and long ones, whole chunks and a row more, and forks.
TREES = ((0, 1, 2), (0, 1, 64), (0, 1, 256), (0, 8, 8), (0, 4, 64), (0, 2, 129), (64, 8, 8), (64, 2, 64))
REPEATS = 2  # keep the minimum; a mixer takes far longer than attention does


def mixers_key(layer: Layer) -> list[Any]:
    """What their rates depend on: classes, sizes and numbers of the mixers, and the packages with their kernels."""
    return [
        *([_described(mixer), number] for mixer, number in layer.mixers),
        {name: _version(name) for name in KERNELS},
    ]


def measured_run_cost(layer: Layer) -> tuple[RunCost, float]:
    """The rates of the mean mixer, and how far they are from what was measured: root mean square, relative.

    Without forks if no mixer can start from a state with a gradient.
    """
    forks = can_fork(layer)
    tables = [_table(*tree) for tree in TREES if forks or not tree[0]]
    seconds = np.array([_mean_seconds(layer, table) for table in tables])
    fits = {rows: _fit(tables, seconds, rows) for rows in CHUNKS}
    chunk_rows = min(fits, key=lambda rows: fits[rows][1])
    (call, row, chunk, state), error = fits[chunk_rows]
    rates = {"call": call, "row": row, "chunk": chunk, "state": state}
    return RunCost(**rates, chunk_rows=chunk_rows, can_fork=forks), error


def can_fork(layer: Layer) -> bool:
    """Whether some mixer can start from a state with a gradient."""
    return not all(_why_it_cannot_fork(layer, mixer) for mixer, _ in layer.mixers)


def counts_of(table: RunTable, chunk_rows: int) -> tuple[int, int, int, int]:
    """How often the rates of a call, a row, a chunk and a state are paid."""
    chunks = sum(call.num_runs * -(-call.length // chunk_rows) for call in table.calls)
    return len(table.calls), len(table.rows), chunks, table.num_forks + len(table.parents)


def _fit(tables: list[RunTable], seconds: np.ndarray, chunk_rows: int) -> tuple[list[float], float]:
    """The rates if chunks have so many rows, and their relative error."""
    counts = np.array([counts_of(table, chunk_rows) for table in tables], dtype=np.float64)
    rates = non_negative_fit(counts, seconds)
    return rates, float(np.sqrt(np.square(counts @ np.array(rates) / seconds - 1).mean()))


def _table(trunk: int, num_runs: int, length: int) -> RunTable:
    """Runs of one length, in one call, that continue a trunk of so many rows, or start from nothing."""
    lengths = [trunk] * bool(trunk) + [length] * num_runs
    parents = [-1] * bool(trunk) + [0 if trunk else -1] * num_runs
    return runs_of_segments(np.cumsum([0, *lengths]), np.array(parents), min_saved=2)


def _mean_seconds(layer: Layer, table: RunTable) -> float:
    """Of one mixer, over all of the model."""
    total = sum(number * fastest(_step(layer, mixer, table), layer.device, REPEATS) for mixer, number in layer.mixers)
    return total / sum(number for _, number in layer.mixers)


def _step(layer: Layer, mixer: nn.Module, table: RunTable) -> Callable[[], None]:
    """A mixer on random rows, forward and backward. No gradient is kept."""
    runs = RunLayout.from_table(table).to(layer.device)
    given = _given(layer, mixer, len(table.places))
    inputs = [next(iter(given.values())).requires_grad_(), *(x for x in mixer.parameters() if x.requires_grad)]

    def run() -> None:
        with _computing(layer, mixer):
            output = run_on_tree(mixer, _forward(mixer), given, runs)
        outputs = output if isinstance(output, tuple) else (output,)
        torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True)

    return run


def _why_it_cannot_fork(layer: Layer, mixer: nn.Module) -> str | None:
    with _computing(layer, mixer):
        return why_it_cannot_fork(mixer, _forward(mixer), _given(layer, mixer, 1))


def _forward(mixer: nn.Module) -> Callable[..., Any]:
    """As the class has it: a prepared model has another in its place."""
    return partial(type(mixer).forward, mixer)


def _given(layer: Layer, mixer: nn.Module, num_rows: int) -> dict[str, Tensor]:
    """The arguments of a mixer: the first one is its input, and the others may be left out."""
    name = list(inspect.signature(type(mixer).forward).parameters)[1]
    options = {**layer.random_options(), "dtype": _weight_dtype(layer, mixer)}
    return {name: torch.randn(1, num_rows, layer.model.hidden_size, **options)}


def _computing(layer: Layer, mixer: nn.Module) -> AbstractContextManager[Any]:
    """Autocast if the computation has another dtype than the weights."""
    if _weight_dtype(layer, mixer) == layer.dtype:
        return nullcontext()
    return torch.autocast(layer.device.type, layer.dtype)


def _weight_dtype(layer: Layer, mixer: nn.Module) -> torch.dtype:
    """Of the matrices; quantized ones are whole numbers and compute in the dtype of the layer."""
    found = (x.dtype for x in mixer.parameters() if x.ndim > 1 and x.is_floating_point())
    return next(found, layer.dtype)


def _described(mixer: nn.Module) -> dict[str, Any]:
    """Its class, what it keeps of its configuration, and its shapes."""
    sizes = {name: value for name, value in vars(mixer).items() if isinstance(value, int | float | str)}
    for name in ("layer_idx", "training"):
        sizes.pop(name, None)
    shapes = {name: [*x.shape, str(x.dtype), x.requires_grad] for name, x in mixer.named_parameters()}
    return {"class": type(mixer).__name__, "sizes": sizes, "shapes": shapes}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
