"""Measures tokens per second of training, without what happens between the steps."""

from __future__ import annotations

import time

from radixtrain.collators.steps import Step


class Speed:
    """Tokens per second of the last step and of the whole run: effective ones, and computed ones (rows).

    num_tokens: effective ones, which an ordinary trainer computes: those of whole chats, if they were split into turns.
    num_row_tokens: T of the same rows, which is more for split chats.
    num_unique_tokens: rows if every step had been one micro-batch; None with `dedup: false`.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_row_tokens = self.num_computed_tokens = self.num_steps = self.num_micro_batches = 0
        self.num_unique_tokens: int | None = 0
        self.seconds = self.last = 0.0

    def start(self) -> None:
        """Start timing the next step."""
        self.last = time.perf_counter()

    def add(self, step: Step) -> tuple[float, float]:
        """Count a step that ends now. Returns its effective and its computed tokens per second."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        self.seconds += elapsed
        self.num_steps += 1
        self.num_micro_batches += len(step.micro_batches)
        self.num_tokens += step.num_ordinary_tokens
        self.num_row_tokens += step.num_tokens
        self.num_computed_tokens += step.num_computed_tokens
        if self.num_unique_tokens is None or step.num_unique_tokens is None:
            self.num_unique_tokens = None
        else:
            self.num_unique_tokens += step.num_unique_tokens
        return step.num_ordinary_tokens / elapsed, step.num_computed_tokens / elapsed

    @property
    def rates(self) -> tuple[float, float]:
        """Return effective and computed tokens per second, over all steps."""
        return self.num_tokens / self.seconds, self.num_computed_tokens / self.seconds

    @property
    def r(self) -> float:
        """Return tokens per computed token, over all steps."""
        return self.num_tokens / self.num_computed_tokens

    @property
    def best_r(self) -> float | None:
        """Return r if every step had been one micro-batch. None with `dedup: false`."""
        return self.num_tokens / self.num_unique_tokens if self.num_unique_tokens else None

    @property
    def r_text(self) -> str:
        """Describe r, by both baselines if chats were split, and the best r."""
        r = f"{self.r:.2f} tokens per computed token"
        best = f"{self.best_r:.2f} at best (each step one micro-batch)" if self.best_r else ""
        is_split = self.num_tokens < self.num_row_tokens
        rows = f"{self.num_row_tokens / self.num_computed_tokens:.2f} against the same rows" if is_split else ""
        return ", ".join(filter(None, (f"{r} against whole chats" if is_split else r, best, rows)))
