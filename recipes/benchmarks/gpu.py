"""What one GPU says about radixtrain, in one call of ten minutes: is it the same, and how fast is it, beside what else?

    python recipes/benchmarks/gpu.py --json 2026-11-23-gpu.json  # and 2026-11-23-gpu.md, the same for people
    python recipes/benchmarks/gpu.py --parts step --models Qwen3-4B --attention cascade path
    python recipes/benchmarks/gpu.py --device cpu --tiny         # the same code, in seconds

Needs torch (2.10 or newer), transformers and numpy; Triton, flash-attn and flash-attn-3 are measured if they are
installed. Nothing is downloaded: weights and tokens are random.

Parts, most important first; `gpu_parts/` says what each measures. `seconds` is what an H100 should take.

| part          | seconds | what                                                                                      |
|---------------|---------|-------------------------------------------------------------------------------------------|
| `equivalence` | 40      | gradients of every strategy and kernel in bfloat16, against float64                       |
| `sync`        | 20      | whether a step waits for the device                                                       |
| `step`        | 170     | steps and forward passes of Qwen3-0.6B, 4B and 8B shapes, against padded and packed rivals |
| `rates`       | 40      | whether the fixed rates choose as well as a calibration                                   |
| `rows`        | 15      | segment sum beside a copy of as many bytes                                                |
| `unshared`    | 30      | a step of sequences that share nothing: it should cost nothing                            |
| `attention`   | 50      | one layer: every strategy and kernel on three trees                                       |
| `unequal`     | 90      | steps of sequences of unequal lengths                                                     |

Each part gets its share of the time that is left, looks at the clock, and leaves out by name what does not fit. A part
that fails says so, and the others go on. If an error leaves the device unusable, the parts that are left run in a fresh
process. Both files are whole after every result.

The page begins with the bars of `gpu_parts/bars.py`: pass, fail or left out, beside the figure. The exit code is 1 if a
gradient is wrong.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu_parts.kernels import (
    HEADS,
    PLANS,
    SUMS,
    TINY_HEADS,
    TINY_PLANS,
    TINY_SUMS,
    attention,
    equivalence,
    rows,
)
from gpu_parts.run import Run, facts
from gpu_parts.steps import MODELS, TINY_MODELS, rates, steps, unequal, unshared
from gpu_parts.sync import sync

from radixtrain.bench.cells import ModelShape

PARTS = {
    **{"equivalence": 40, "sync": 20, "step": 170, "rates": 40},
    **{"rows": 15, "unshared": 30, "attention": 50, "unequal": 90},
}
"""Seconds that each should take; the time that is left is shared in this proportion."""
VERIFIED = ModelShape(4, 256, head_dim=64, vocab_size=512, name="small")  # wide enough for every kernel


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="shapes that a laptop measures in seconds")
    parser.add_argument("--seconds", type=float, default=520, help="in all; a result that was begun is finished")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=[str(shape) for shape in MODELS], help="of steps; default all")
    parser.add_argument("--attention", nargs="+", default=["cascade"], choices=["cascade", "path", "expand"])
    parser.add_argument("--json", type=Path, help="a file to write; the page has its name and ends in .md")
    parser.add_argument("--go_on", action="store_true", help="keep the results that the file has")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; --device cpu --tiny runs the same code", file=sys.stderr)
        return 1
    run = _run_of(options)
    parts, left = calls(run, options), [name for name in PARTS if name in options.parts]
    try:
        while left:
            name = left.pop(0)
            with run.part(name, PARTS[name] / sum(PARTS[part] for part in (name, *left))):
                parts[name]()
            if left and not device_works(run.device):
                return _in_a_fresh_process(run, left, argv)
    finally:
        run.write()
        print(run.page())
    return int(not all(measures.get("passed", True) for _, _, measures in run.results))


def _run_of(options: argparse.Namespace) -> Run:
    device = torch.device(options.device)
    header = {**facts(device), "shapes": "tiny" if options.tiny else "Qwen3", "parts": " ".join(options.parts)}
    run = Run(device, options.seconds, header, options.json)
    if options.go_on:
        run.read()
    print(", ".join(f"{name} {value}" for name, value in run.header.items()), flush=True)
    return run


def calls(run: Run, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """The parts, with the shapes of a GPU or with tiny ones."""
    tiny, arms = options.tiny, tuple(options.attention)
    models = TINY_MODELS if tiny else MODELS
    models = tuple(shape for shape in models if options.models is None or str(shape) in options.models)
    small, prompt = (TINY_MODELS[0], 32) if tiny else (VERIFIED, 256)
    layer = (TINY_PLANS, TINY_HEADS) if tiny else (PLANS, HEADS)
    return {
        "equivalence": lambda: equivalence(run, small, prompt),
        "sync": lambda: sync(run, small, prompt),
        "step": lambda: steps(run, models, arms, *((32, 8, 4) if tiny else (2048, 256, 32))),
        "rates": lambda: rates(run, models[0], *((32, 8, 4) if tiny else (512, 64, 32))),
        "rows": lambda: rows(run, TINY_SUMS if tiny else SUMS),
        "unshared": lambda: unshared(run, models[:1], arms, *((40, 4) if tiny else (2304, 8))),
        "attention": lambda: attention(run, *layer),
        "unequal": lambda: unequal(run, models[:2], arms, *((32, 64, 9) if tiny else (2048, 1024, 32))),
    }


def device_works(device: torch.device) -> bool:
    """Some errors of a kernel leave the process without its device."""
    try:
        return float(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def _in_a_fresh_process(run: Run, left: list[str], argv: Sequence[str]) -> int:
    """Replaces this process; without a file its results stay in what was printed."""
    run.leave_out("this process", f"the device does not answer any more; {', '.join(left)} run in a fresh one")
    seconds = max(0.0, run.seconds - run.seconds_passed)
    flags = [*argv, f"--seconds={seconds:.0f}", "--go_on", "--parts", *left]
    os.execv(sys.executable, [sys.executable, __file__, *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
