"""The keys of `radixtrain bench`, checked first: otherwise a wrong one would fail after minutes, in other words."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from radixtrain.attention import choose_attention
from radixtrain.bench.cells import Cell, ModelShape
from radixtrain.errors import UserError

__all__ = ["Attention", "check_options", "grid", "strategies"]

Attention = Literal["auto", "cascade", "path", "expand"]
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
T = TypeVar("T")


def check_options(
    *,
    repeats: int,
    num_threads: int | None,
    device: str,
    dtype: str,
    csv: str | None,
    max_teraflops: float | None = None,
    plot: str | None = None,
    ordinary: bool = True,
) -> None:
    """All keys but the grid and the strategies. Raises UserError that names the key."""
    for name, number in (("repeats", repeats), ("num_threads", num_threads), ("max_teraflops", max_teraflops)):
        if number is not None and number <= 0:
            raise UserError(f"{name} must be above 0, got {number}")
    for name, value, choices in (("device", device, DEVICES), ("dtype", dtype, DTYPES)):
        if value not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}, got {value}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: torch sees no CUDA device; set device to cpu")
    for name, path in (("csv", csv), ("plot", plot)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(f"{name}: no such folder: {Path(path).parent}")
    if plot is not None:
        _check_plot(plot, ordinary)


def grid(models: Any, prompt_length: Any, suffix_length: Any, num_sequences: Any, tree: Any, mode: Any) -> list[Cell]:
    """The cells, a model at a time. Each argument is a value or a list. Raises UserError that names the key."""
    for shape in _listed(models):
        _check_shape(shape)
    axes = {
        "prompt_length": (prompt_length, 0),
        "suffix_length": (suffix_length, 2),
        "num_sequences": (num_sequences, 1),
    }
    for name, (values, minimum) in axes.items():
        _check_at_least(minimum, name, _listed(values))
    return [
        Cell(*point)
        for point in product(*map(_listed, (models, prompt_length, suffix_length, num_sequences, tree, mode)))
    ]


def strategies(
    wanted: str | Sequence[str], kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[str, ...]:
    """The strategies, each once; `auto` stays, for the calibration to choose. Raises UserError if one cannot run."""
    names = [wanted] if isinstance(wanted, str) else wanted
    for name in names:
        choose_attention(name, kernel, device, dtype, head_dim)
    return tuple(dict.fromkeys(names))


def _check_plot(plot: str, ordinary: bool) -> None:
    if Path(plot).suffix not in (".png", ".svg"):
        raise UserError(f"plot must end in .png or .svg, got {plot}")
    if not ordinary:
        raise UserError("plot shows speed-ups, which ordinary: false leaves unmeasured; set plot to null")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plot needs matplotlib: pip install matplotlib")


def _check_shape(shape: ModelShape) -> None:
    for name, value in vars(shape).items():
        if isinstance(value, int) and not isinstance(value, bool):
            _check_at_least(1, f"models: {name}", [value])
    config = shape.config()
    if config.num_attention_heads % (config.num_key_value_heads or 1):
        raise UserError(
            f"models: num_attention_heads ({config.num_attention_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_key_value_heads})"
        )


def _check_at_least(minimum: int, name: str, values: list[int]) -> None:
    for value in values:
        if value < minimum:
            raise UserError(f"{name} must be at least {minimum}, got {value}")


def _listed(value: T | list[T]) -> list[T]:
    """A key whose value is one or a list, as a list."""
    return value if isinstance(value, list) else [value]
