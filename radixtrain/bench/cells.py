"""What a benchmark measures: a model with random weights, and the sequences of one training step.

A `Cell` is a point of the grid: random tokens after shared prompts of a given length. A `GivenBatch` names sequences
of another origin, such as a batch of a user's own data. The keys of `radixtrain bench` are checked first: a wrong one
would otherwise fail after minutes, with a less helpful message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from radixtrain.attention import choose_attention
from radixtrain.collators.token_row import IGNORE_INDEX
from radixtrain.errors import UserError, first_line
from radixtrain.settings.commands import Mode, ShapeSettings, Tree

LEAST = {"prompt_length": 0, "suffix_length": 2, "num_sequences": 1}  # along the axes of a grid
SEQUENCES_IN_A_GROUP = 4  # of a nested tree
MODELS: dict[str, type[PreTrainedModel]] = {"qwen3": Qwen3ForCausalLM, "qwen3_5": Qwen3_5ForCausalLM}


class ModelShape(ShapeSettings):
    """A Qwen3, or a Qwen3.5, with random weights."""

    def __str__(self) -> str:
        hybrid = "" if self.family == "qwen3" else " hybrid"
        return self.name or f"{self.num_hidden_layers}x{self.hidden_size}{hybrid}"

    def config(self) -> Qwen3Config | Qwen3_5TextConfig:
        heads = self.num_attention_heads or max(1, self.hidden_size // self.head_dim)
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size or 3 * self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or max(1, heads // 2),
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        if self.family == "qwen3":
            return Qwen3Config(**sizes)
        recurrent_heads = max(1, 2 * self.hidden_size // self.head_dim)  # as in the small Qwen3.5
        return Qwen3_5TextConfig(
            **sizes,
            linear_num_key_heads=recurrent_heads,
            linear_num_value_heads=recurrent_heads,
            linear_key_head_dim=self.head_dim,
            linear_value_head_dim=self.head_dim,
        )


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    prompt_length, suffix_length: tokens that all sequences share, and tokens of each one's own, which bear the loss.
    tree: `flat`, one prompt for all; or `nested`, three levels: all sequences share the first half of the prompt, every
        four of them the second half, and each has a suffix of its own.
    mode: `step`, forward and backward; or `forward`, without gradients.
    """

    model: ModelShape
    prompt_length: int
    suffix_length: int
    num_sequences: int
    tree: Tree = "flat"
    mode: Mode = "step"

    def __str__(self) -> str:
        return f"{self.model}, {self.sequences}, {self.tree}, {self.mode}"

    @property
    def sequences(self) -> str:
        """Name the sequences as the table does."""
        return f"{self.num_sequences} x ({self.prompt_length} + {self.suffix_length})"


@dataclass(frozen=True)
class GivenBatch:
    """Sequences from elsewhere. sequences: their name in the table, such as `64 of train.jsonl`."""

    model: ModelShape
    sequences: str
    num_sequences: int
    mode: Mode = "step"
    tree: ClassVar[str] = "data"

    def __str__(self) -> str:
        return f"{self.model}, {self.sequences}, {self.mode}"


def build_model(shape: ModelShape, device: torch.device, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Build a model with random weights, the same ones every time."""
    torch.manual_seed(0)
    options = {"dtype": dtype, "attn_implementation": attn_implementation}
    try:
        with device:
            model: Any = MODELS[shape.family]._from_config(shape.config(), **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"attn_implementation: {first_line(error)}") from None
    return model.train()


def features_of_cell(cell: Cell) -> list[dict[str, np.ndarray]]:
    """Make `input_ids` and `labels` of each sequence, (L,), int64: random, the same every time. Suffixes have labels.

    Branches differ in their first token.
    """
    rng = np.random.default_rng(0)

    def branches(number: int, length: int) -> np.ndarray:
        ids = rng.integers(0, cell.model.vocab_size, (number, length))
        ids[:, :1] = (ids[:1, :1] + np.arange(number)[:, None]) % cell.model.vocab_size
        return ids

    suffixes = branches(cell.num_sequences, cell.suffix_length)
    trunk_length = cell.prompt_length if cell.tree == "flat" else cell.prompt_length // 2
    (trunk,) = branches(1, trunk_length)
    groups = branches(-(-cell.num_sequences // SEQUENCES_IN_A_GROUP), cell.prompt_length - trunk_length)
    prompts = [np.concatenate([trunk, groups[n // SEQUENCES_IN_A_GROUP]]) for n in range(cell.num_sequences)]
    return [
        {
            "input_ids": np.concatenate([prompt, suffix]),
            "labels": np.concatenate([np.full_like(prompt, IGNORE_INDEX), suffix]),
        }
        for prompt, suffix in zip(prompts, suffixes, strict=True)
    ]


def check_options(
    *,
    repeats: int,
    num_threads: int | None,
    device: str,
    csv: str | None,
    max_teraflops: float | None = None,
    plot: str | None = None,
) -> None:
    """Check all keys but the grid and the strategies. Raises UserError that names the key."""
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
    """Make the cells, model by model. Each argument is a value or a list. Raises UserError that names the key."""
    axes = [
        value if isinstance(value, list) else [value]
        for value in (models, prompt_length, suffix_length, num_sequences, tree, mode)
    ]
    for name, values in zip(("models", *LEAST, "tree", "mode"), axes, strict=True):
        _check_not_empty(name, values)
    for shape in axes[0]:
        _check_shape(shape)
    for (name, minimum), values in zip(LEAST.items(), axes[1:4], strict=True):
        for value in values:
            _check_at_least(minimum, name, value)
    return [Cell(*point) for point in product(*axes)]


def strategies(
    wanted: str | Sequence[str], kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[str, ...]:
    """Return the strategies, each once. Raises UserError if one cannot run."""
    names = [wanted] if isinstance(wanted, str) else wanted
    _check_not_empty("attention", names)
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


def _check_not_empty(name: str, values: Sequence[Any]) -> None:
    if not values:
        raise UserError(f"{name} is an empty list: nothing would be timed")


def _check_at_least(minimum: int, name: str, value: int) -> None:
    if value < minimum:
        raise UserError(f"{name} must be at least {minimum}, got {value}")
