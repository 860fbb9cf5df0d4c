"""A training loop of a user's own, which the harness takes for a trainer, and the padded batches that it trains on.

def build(share):
    return Loop(share(tiny_qwen3()), padded_batches("left"), own_loss)

found = compare(build)
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainer_harness import STEPS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
EOS = 2
IGNORED = -100

Batch = dict[str, Tensor]
Metrics = dict[str, Tensor]
Step = Callable[[Any, Batch], Metrics]  # `loss` is what the loop differentiates


@dataclass
class History:
    """What a loop has logged, where a `Trainer` has it."""

    log_history: list[dict[str, float]] = field(default_factory=list)


class Loop:
    """One optimizer step a batch, with clipping. What it logs: the metrics of `step`, and grad_norm."""

    def __init__(self, model: nn.Module, batches: Iterable[Batch], step: Step, learning_rate: float = 1e-4):
        self.model, self.batches, self.step = model.train(), batches, step
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.state = History()
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(self) -> None:
        for batch in self.batches:
            metrics = self.step(self.model, batch)
            metrics["loss"].backward()
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for callback in self.callbacks:
                callback.on_pre_optimizer_step(None, None, None, model=self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.log_history.append({name: value.item() for name, value in metrics.items()})


def padded_batches(side: str = "right", pad: int = 0, seed: int = 0, steps: int = STEPS) -> list[Batch]:
    """Six rows a batch, five of which begin with one prompt and one with half of it; two are equal.

    Every row ends with EOS, which is also what fills the padding if pad is EOS. labels: (B, L), -100 on the prompt and
    on padding.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(steps):
        tails = [[*rng.integers(10, 50, length).tolist(), EOS] for length in (2, 9, 5, 3, 7)]
        rows = [PROMPT + tail for tail in (*tails[:4], tails[3])] + [PROMPT[:6] + tails[4]]
        starts = [len(PROMPT)] * 5 + [6]
        labels = [[IGNORED] * start + row[start:] for start, row in zip(starts, rows, strict=True)]
        batches.append(padded(rows, labels, side, pad))
    return batches


def padded(rows: list[list[int]], labels: list[list[int]], side: str, pad: int) -> Batch:
    """input_ids, attention_mask, labels: (B, L), int64. side: right, left or both."""
    masks = [[1] * len(row) for row in rows]
    length = max(map(len, rows)) + (2 if side == "both" else 0)
    columns = {"input_ids": (rows, pad), "attention_mask": (masks, 0), "labels": (labels, IGNORED)}
    return {
        name: torch.tensor([fill(row, filler, length, side) for row in values])
        for name, (values, filler) in columns.items()
    }


def fill(row: list[int], filler: int, length: int, side: str) -> list[int]:
    """The row with padding up to `length` entries. both: one entry on the left, the others on the right."""
    missing = length - len(row)
    left = {"right": 0, "both": 1, "left": missing}[side]
    return [filler] * left + row + [filler] * (missing - left)


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def without_labels(batch: Batch) -> Batch:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def own_loss(model: Any, batch: Batch) -> Metrics:
    """The loss that a Hugging Face model computes from labels, in a call that says nothing about a cache."""
    return {"loss": model(**batch).loss}
