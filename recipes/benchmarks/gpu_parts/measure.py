"""The process that measures: its run, and its parts one after the other."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from gpu_parts.run import Run, facts

__all__ = ["measure", "run_parts"]


def measure(
    options: argparse.Namespace,
    part_seconds: Mapping[str, float],
    calls: Callable[[Run, argparse.Namespace], Mapping[str, Callable[[], None]]],
) -> int:
    """Measure the parts that are asked for, until `options.until`. Returns 1 without the device.

    part_seconds: what each should take, for its share of the time. calls: makes the parts, by name.
    """
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
