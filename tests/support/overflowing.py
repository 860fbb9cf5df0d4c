"""Rows of which one has a weight that the loss cannot hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["write_overflowing"]


def write_overflowing(folder: Path) -> Path:
    """20 rows of tokens, of which the 8th makes its step overflow: with `on_nonfinite: skip`, one of each epoch."""
    draw = random.Random(0)
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(20):
            ids = [*range(40, 60), *(draw.randrange(40, 200) for _ in range(6))]
            weights = [0.0] * 20 + [2e38 if number == 7 else 1.0] * 6
            file.write(f"{json.dumps({'input_ids': ids, 'labels': ids, 'loss_weights': weights})}\n")
    return path
