"""Tokens per second of training, without what happens between the steps."""

from __future__ import annotations

import time

__all__ = ["Speed"]


class Speed:
    """Tokens per second of the last step and of the whole run: effective ones (T) and computed ones (rows)."""

    def __init__(self) -> None:
        self.num_tokens = self.num_computed_tokens = 0
        self.seconds = self.last = 0.0

    def start(self) -> None:
        """The next step begins now."""
        self.last = time.perf_counter()

    def add(self, num_tokens: int, num_computed_tokens: int) -> tuple[float, float]:
        """Count a step that ends now. Returns its effective and its computed tokens per second."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        self.seconds += elapsed
        self.num_tokens += num_tokens
        self.num_computed_tokens += num_computed_tokens
        return num_tokens / elapsed, num_computed_tokens / elapsed
