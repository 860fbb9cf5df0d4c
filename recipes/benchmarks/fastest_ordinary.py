"""The ordinary arm of sequences that differ in length, in the fastest of several sizes of a micro-batch.

Few sequences have little padding, many keep the cores busy. A user would try several.
"""

import math
import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from radixtrain.bench.work import Arm, Work, step_seconds, with_ordinary_batch_size
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head

__all__ = ["fastest_ordinary"]


def fastest_ordinary(
    model: PreTrainedModel, work: Work, batch_sizes: Sequence[int | None] = (8, 16, 32, None), repeats: int = 2
) -> tuple[Work, dict[int, float]]:
    """The work with its ordinary arm cut the fastest way, and the seconds of a step for each size of a micro-batch.

    batch_sizes: numbers of sequences to try; None for all in one batch. The seconds of a number that memory does not
        hold are infinite.
    repeats: turns of each, after one that is not timed; the median counts.

    Raises UserError if memory holds none of them.
    """
    device = next(model.parameters()).device
    # sdpa is fastest without a mask; other kernels skip the padding that a mask shows them
    keep_mask = model.config._attn_implementation != "sdpa"
    sizes = dict.fromkeys(min(size or len(work.lengths), len(work.lengths)) for size in batch_sizes)
    works = {size: with_ordinary_batch_size(work, size, keep_mask).to(device) for size in sizes}
    arm = Arm(plain_head=has_plain_head(model))
    runs = {size: (arm, each) for size, each in works.items() if fits(model, arm, each)}
    if not runs:
        raise UserError(f"{work.cell}: the device's memory holds no ordinary micro-batch of {list(sizes)} sequences")
    turns = step_seconds(model, runs, repeats)
    seconds = {size: statistics.median(turns[size]) if size in turns else math.inf for size in sizes}
    return works[min(seconds, key=lambda size: seconds[size])], seconds


def fits(model: PreTrainedModel, arm: Arm, work: Work) -> bool:
    """The turn that is not timed."""
    arm.prepare(model)
    try:
        arm.run_step(model, work)
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True
