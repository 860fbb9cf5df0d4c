"""The keys of `radixtrain bench`, checked first: otherwise a wrong one would fail after minutes, in other words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from radixtrain.attention import choose_attention
from radixtrain.bench.cells import Cell, ModelShape
from radixtrain.errors import UserError

Attention = Literal["auto", "cascade", "path", "expand"]
LEAST = {"prompt_length": 0, "suffix_length": 2, "num_sequences": 1}  # of the axes of a grid


def check_options(
    *,
    repeats: int,
    num_threads: int | None,
    device: str,
    csv: str | None,
    max_teraflops: float | None = None,
    plot: str | None = None,
) -> None:
    """All keys but the grid and the strategies. Raises UserError that names the key."""
    for name, number in (("repeats", repeats), ("num_threads", num_threads), ("max_teraflops", max_teraflops)):
        if number is not None and number <= 0:
            raise UserError(f"{name} must be above 0, got {number}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: torch sees no CUDA device; set device to cpu")
    for name, path in (("csv", csv), ("plot", plot)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(f"{name}: no such folder: {Path(path).parent}")
    if plot is not None and Path(plot).suffix not in (".png", ".svg"):
        raise UserError(f"plot must end in .png or .svg, got {plot}")


def grid(models: Any, prompt_length: Any, suffix_length: Any, num_sequences: Any, tree: Any, mode: Any) -> list[Cell]:
    """The cells, a model at a time. Each argument is a value or a list. Raises UserError that names the key."""
    axes = [
        value if isinstance(value, list) else [value]
        for value in (models, prompt_length, suffix_length, num_sequences, tree, mode)
    ]
    for shape in axes[0]:
        _check_shape(shape)
    for (name, minimum), values in zip(LEAST.items(), axes[1:4], strict=True):
        for value in values:
            _check_at_least(minimum, name, value)
    return [Cell(*point) for point in product(*axes)]


def strategies(
    wanted: str | Sequence[str], kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[str, ...]:
    """The strategies, each once; `auto` stays, for the cost model to choose. Raises UserError if one cannot run."""
    names = [wanted] if isinstance(wanted, str) else wanted
    for name in names:
        choose_attention(name, kernel, device, dtype, head_dim)
    return tuple(dict.fromkeys(names))


def _check_shape(shape: ModelShape) -> None:
    for name, value in vars(shape).items():
        if isinstance(value, int) and not isinstance(value, bool):
            _check_at_least(1, f"models: {name}", value)
    config = shape.config()
    if config.num_attention_heads % (config.num_key_value_heads or 1):
        raise UserError(
            f"models: num_attention_heads ({config.num_attention_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_key_value_heads})"
        )


def _check_at_least(minimum: int, name: str, value: int) -> None:
    if value < minimum:
        raise UserError(f"{name} must be at least {minimum}, got {value}")
