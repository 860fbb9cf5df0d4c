"""The parts of `gpu.py`, with the shapes of a GPU or tiny ones, and the process that measures them."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from gpu_parts.attention import HEADS, TINY_HEADS, attention, table
from gpu_parts.batches import MODELS, STEPS, TINY_MODEL, Case, cases, one_prompt
from gpu_parts.ceilings import SIZES, TINY_SIZES, ceilings
from gpu_parts.equivalence import equivalence
from gpu_parts.kernel_times import profile_steps
from gpu_parts.loss_chunks import loss_chunks
from gpu_parts.plans import PLANS, TINY_PLANS
from gpu_parts.rates import rates
from gpu_parts.repeat import repeat
from gpu_parts.rows import SUMS, TINY_SUMS, rows
from gpu_parts.run import Run, facts
from gpu_parts.shared import generation, shared
from gpu_parts.steps import steps
from gpu_parts.sync import sync

from radixtrain.bench.cells import ModelShape

__all__ = ["calls", "device_works", "measure", "run_parts"]

VERIFIED = ModelShape(4, 256, head_dim=64, vocab_size=512, name="small")  # wide enough for every kernel


def measure(options: argparse.Namespace, part_seconds: Mapping[str, float]) -> int:
    """Measure the parts that are asked for, until `options.until`. Returns 1 without the device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; --device cpu --tiny runs the same code", file=sys.stderr)
        return 1
    run = run_of(options)
    run_parts(run, calls(run, options), options.parts, part_seconds)
    return 0


def run_of(options: argparse.Namespace) -> Run:
    """The run, which goes on with what its file holds."""
    device = torch.device(options.device)
    run = Run(path=options.json, device=device, seconds=max(0.0, options.until - time.time()))
    run.read()
    run.header |= {**facts(device), "shapes": "tiny" if options.tiny else "Qwen3"}
    run.header["commit"] = options.commit or run.header["commit"]
    print(", ".join(f"{name} {value}" for name, value in run.header.items()), flush=True)
    return run


def run_parts(
    run: Run, parts: Mapping[str, Callable[[], None]], names: Sequence[str], part_seconds: Mapping[str, float]
) -> None:
    """The parts of these names, each with its share of the time, until the device is gone."""
    for number, name in enumerate(names):
        with run.part(name, part_seconds[name] / sum(part_seconds[each] for each in names[number:])):
            parts[name]()
        if not device_works(run.device):
            return run.leave_out("this process", "the device does not answer any more")
    return None


def device_works(device: torch.device) -> bool:
    """Some errors of a kernel leave the process without its device. Frees what the parts before have held."""
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return float(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def calls(run: Run, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Every part, with the shapes of a GPU or with tiny ones."""
    tiny, arms = options.tiny, options.arms
    small, prompt = (TINY_MODEL, 32) if tiny else (VERIFIED, 256)
    shape, heads = (TINY_MODEL, TINY_HEADS) if tiny else (MODELS[options.models[0]], HEADS)
    of_part = {part: cases(part, options.models, tiny) for part in STEPS}
    in_a_loop = Case(shape, one_prompt(32, 8, 4) if tiny else one_prompt(2048, 256, 4))
    answered = Case(shape, one_prompt(32, 4, 4) if tiny else one_prompt(2048, 32, 32))
    return {
        **{part: partial(steps, run, part, each, arms) for part, each in of_part.items()},
        "equivalence": lambda: equivalence(run, small, prompt),
        "sync": lambda: sync(run, small, prompt),
        "ceilings": lambda: ceilings(run, TINY_SIZES if tiny else SIZES),
        "repeat": lambda: repeat(run, small, prompt),
        "chunks": lambda: loss_chunks(run, shape, *((64, range(12, 14)) if tiny else (8192, range(24, 29)))),
        "profile": lambda: profile_steps(run, of_part["step"][0], arms),
        "rates": lambda: rates(run, of_part["rates"]),
        "rows": lambda: rows(run, TINY_SUMS if tiny else SUMS),
        "attention": lambda: attention(run, TINY_PLANS if tiny else PLANS, heads),
        "shared": lambda: shared(run, in_a_loop),
        "generate": lambda: generation(run, answered, 4 if tiny else 64),
        "table": lambda: table(run, heads, shrink=512 if tiny else 1),
    }
