"""Which steps are measured: every row of `STEPS` is a batch, its models, and what is changed in them.

| part       | sequences                                                                |
|------------|--------------------------------------------------------------------------|
| `step`     | 32 with a prompt of 2,048 and 256 of their own; and its forward pass     |
| `trees`    | an agent: 20 turns of 400 tokens, each seen by an answer of 100          |
| `groups`   | a group of RL: 8 answers of 1,024 after a prompt of 1,024                |
| `liger`    | those of `step`, norms, rotary embeddings and MLPs by Liger, in all arms |
| `compile`  | those of `step`, every layer compiled by torch.compile, in all arms      |

All tokens and weights are random. 4B and 8B compute activations again in the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from step import Mode, ModelShape, random_rows

from radixtrain.collators.token_row import IGNORE_INDEX

__all__ = ["MODELS", "STEPS", "TINY_MODEL", "Batch", "Case", "agent", "cases", "one_prompt"]

QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
MODELS = {
    "0.6B": ModelShape(28, 1024, 3072, 16, **QWEN3, name="Qwen3-0.6B"),
    "4B": ModelShape(36, 2560, 9728, 32, **QWEN3, name="Qwen3-4B"),
    "8B": ModelShape(36, 4096, 12288, 32, **QWEN3, tie_word_embeddings=False, name="Qwen3-8B"),
}
TINY_MODEL = ModelShape(2, 64, head_dim=16, vocab_size=100, name="tiny")
RECOMPUTING = ("4B", "8B")
BOTH: tuple[Mode, ...] = ("step", "forward")
Features = Sequence[Mapping[str, Any]]


class Batch(NamedTuple):
    """The sequences of a step. name: in tables."""

    name: str
    features: Callable[[ModelShape], Features]


class Case(NamedTuple):
    """A step to measure.

    recompute: activations are computed again in the backward pass.
    change: of the model, in all arms: "", `compiled` or `liger`.
    """

    shape: ModelShape
    batch: Batch
    mode: Mode = "step"
    recompute: bool = False
    change: str = ""

    def __str__(self) -> str:
        recomputing = "recomputing" if self.recompute else ""
        return ", ".join(filter(None, [f"{self.shape}", self.mode, self.batch.name, recomputing, self.change]))


class Row(NamedTuple):
    """Cases of a part. tiny: the batch that a laptop computes."""

    models: tuple[str, ...]
    batch: Batch
    tiny: Batch
    modes: tuple[Mode, ...] = ("step",)
    change: str = ""


def one_prompt(prompt: int, own: int, number: int) -> Batch:
    """Sequences of `prompt` shared and `own` tokens; the loss is on the own ones."""

    def features(shape: ModelShape) -> Features:
        return random_rows(shape.vocab_size, prompt, own, number)

    return Batch(f"{number} x ({prompt} + {own})", features)


def agent(turns: int, length: int, answer: int) -> Batch:
    """A history that grows by `length` tokens a turn, and after each turn an answer, which has the loss."""
    return Batch(f"{turns} turns x ({length} + {answer})", partial(_agent, turns, length, answer))


def _agent(turns: int, length: int, answer: int, shape: ModelShape) -> Features:
    rng = np.random.default_rng(0)
    history = rng.integers(0, shape.vocab_size, turns * length)
    answers = rng.integers(0, shape.vocab_size, (turns, answer))
    answers[:-1, 0] = (history[length::length] + 1) % shape.vocab_size  # no answer begins as the next turn does
    rows = [(history[: (turn + 1) * length], answers[turn]) for turn in range(turns)]
    return [
        {
            "input_ids": np.concatenate([seen, own]),
            "labels": np.concatenate([np.full_like(seen, IGNORE_INDEX), own]),
        }
        for seen, own in rows
    ]


PLAIN, TINY_PLAIN = one_prompt(2048, 256, 32), one_prompt(32, 8, 4)
STEPS = {
    "step": [Row(("0.6B", "4B", "8B"), PLAIN, TINY_PLAIN, BOTH)],
    "trees": [Row(("0.6B", "4B", "8B"), agent(20, 400, 100), agent(4, 8, 4))],
    "groups": [Row(("0.6B", "4B", "8B"), one_prompt(1024, 1024, 8), one_prompt(16, 16, 4))],
    "liger": [Row(("0.6B", "4B"), PLAIN, TINY_PLAIN, change="liger")],
    "compile": [Row(("0.6B", "4B"), PLAIN, TINY_PLAIN, change="compiled")],
}


def cases(part: str, models: Sequence[str], tiny: bool) -> list[Case]:
    """Those of a part. models: of which, `0.6B`, `4B`, `8B`. tiny: each row once, with the tiny model and batch."""
    found = []
    for row in STEPS[part]:
        asked = [(name, MODELS[name], row.batch) for name in row.models if name in models]
        for name, shape, batch in [("", TINY_MODEL, row.tiny)] if tiny else asked:
            found += [Case(shape, batch, mode, name in RECOMPUTING, row.change) for mode in row.modes]
    return found
