"""The parts of `gpu.py`, with the shapes of a GPU or tiny ones."""

import argparse
from collections.abc import Callable
from functools import partial

from gpu_parts.attention import HEADS, TINY_HEADS, attention, table
from gpu_parts.batches import MODELS, STEPS, TINY_MODEL, cases
from gpu_parts.ceilings import SIZES, TINY_SIZES, ceilings
from gpu_parts.equivalence import equivalence
from gpu_parts.kernel_times import profile_steps
from gpu_parts.loss_chunks import loss_chunks
from gpu_parts.plans import PLANS, TINY_PLANS
from gpu_parts.repeat import repeat
from gpu_parts.run import Run
from gpu_parts.steps import steps
from gpu_parts.sync import sync
from step import ModelShape

__all__ = ["calls"]

VERIFIED = ModelShape(4, 256, head_dim=64, vocab_size=512, name="small")  # wide enough for every kernel


def calls(run: Run, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Every part, with the shapes of a GPU or with tiny ones."""
    tiny, arms = options.tiny, options.arms
    small, prompt = (TINY_MODEL, 32) if tiny else (VERIFIED, 256)
    shape, heads = (TINY_MODEL, TINY_HEADS) if tiny else (MODELS[options.models[0]], HEADS)
    of_part = {part: cases(part, options.models, tiny) for part in STEPS}
    return {
        **{part: partial(steps, run, part, each, arms) for part, each in of_part.items()},
        "equivalence": lambda: equivalence(run, small, prompt),
        "sync": lambda: sync(run, small, prompt),
        "ceilings": lambda: ceilings(run, TINY_SIZES if tiny else SIZES),
        "repeat": lambda: repeat(run, small, prompt),
        "chunks": lambda: loss_chunks(run, shape, *((64, range(12, 14)) if tiny else (8192, range(24, 29)))),
        "profile": lambda: [profile_steps(run, case, arms) for case in of_part["step"][:2]],
        "attention": lambda: attention(run, TINY_PLANS if tiny else PLANS, heads),
        "table": lambda: table(run, heads, shrink=512 if tiny else 1),
    }
