"""The ordinary arm of sequences that differ in length: how many rows of a micro-batch are fastest here?

Few rows have little padding, many keep the cores busy. A user would try, so the baseline is tried too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from radixtrain.bench.arms import run_step, seconds_in_turns, set_arm
from radixtrain.bench.work import Work, with_ordinary_rows
from radixtrain.errors import UserError

__all__ = ["fastest_ordinary"]


def fastest_ordinary(
    model: PreTrainedModel, work: Work, rows: Sequence[int | None] = (8, 16, 32, None), repeats: int = 2
) -> tuple[Work, dict[int, float]]:
    """The work with its ordinary arm cut where it is fastest, and the seconds of a step for each number of rows.

    rows: numbers to try; None for all rows in one batch. Where memory does not hold them, their seconds are infinite.
    repeats: turns of each, after one that is not timed; medians count.

    Raises UserError where memory holds none of them.
    """
    device = next(model.parameters()).device
    # sdpa is fastest without a mask; other kernels skip the padding that a mask shows them
    keep_mask = model.config._attn_implementation != "sdpa"
    sizes = dict.fromkeys(min(size or len(work.lengths), len(work.lengths)) for size in rows)
    tried = {size: with_ordinary_rows(work, size, keep_mask).to(device) for size in sizes}
    runs = {size: (each, None) for size, each in tried.items() if _fits(model, each)}
    if not runs:
        raise UserError(f"{work.cell}: the device's memory holds no ordinary micro-batch of {list(sizes)} rows")
    turns = seconds_in_turns(model, runs, "auto", repeats)
    seconds = {size: statistics.median(turns[size]) if size in turns else math.inf for size in sizes}
    return tried[min(seconds, key=lambda size: seconds[size])], seconds


def _fits(model: PreTrainedModel, work: Work) -> bool:
    """The turn that is not timed."""
    set_arm(model, None, "auto")
    try:
        run_step(model, work, None)
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True
