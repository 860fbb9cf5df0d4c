"""What one GPU says about radixtrain: is it the same, how fast is it beside what else, and where does the time go?

    python recipes/benchmarks/gpu.py --json gpu.json      # and gpu.md, the same for people
    python recipes/benchmarks/gpu.py --parts step --models 4B --arms padded packed cascade path
    python recipes/benchmarks/gpu.py --device cpu --tiny  # the same code, in a minute

Needs torch (2.10 or newer), transformers and numpy; other kernels are measured if they are installed. Nothing is
downloaded: weights and tokens are random. on-a-gpu.md has the commands for a card that is there for 15 minutes.

Parts, most important first; `gpu_parts/` says what each measures. `seconds` is what an H100 should take.

| part            | seconds | what                                                                                  |
|-----------------|---------|---------------------------------------------------------------------------------------|
| `equivalence`   | 35      | gradients of every strategy and kernel in bfloat16, against float64                   |
| `sync`          | 15      | whether a step waits for the device                                                   |
| `step`          | 170     | steps and forward passes of Qwen3-0.6B, 4B and 8B shapes, beside every rival          |
| `ceilings`      | 10      | a copy, a matrix product, attention on each backend: what the card can do             |
| `repeat`        | 15      | whether a step has the same bits again                                                |
| `chunks`        | 10      | head and loss by the size of their chunks                                             |
| `profile`       | 25      | kernels of one step of each arm, on an agent's history and on one prompt              |
| `unshared`      | 30      | sequences that share nothing, of equal and of unequal lengths: it should cost nothing |
| `attention`     | 50      | one layer: every strategy and kernel on three trees                                   |
| `rows`          | 15      | segment sum beside a copy of as many bytes                                            |
| `trees`         | 60      | an agent's history with an answer after each of 20 turns                              |
| `groups`        | 40      | 8 answers to one prompt, as in RL                                                     |
| `shared`        | 25      | share_prefixes beside the model as it is                                              |
| `generate`      | 25      | radixtrain.generate beside model.generate                                             |
| `short`         | 60      | prompts of 512 and answers of 64                                                      |
| `unequal`       | 60      | own parts of 16 to 1,024 tokens                                                       |
| `table`         | 90      | DualKV's table of one layer of attention                                              |
| `checkpointing` | 60      | 4B with and without activations computed again                                        |
| `contexts`      | 120     | prompts of 32k and 64k                                                                |
| `compile`       | 200     | all arms under torch.compile                                                          |
| `liger`         | 60      | all arms with Liger's layers                                                          |

All of them take 20 minutes: ask for some, or for more `--seconds`. Each part gets its share of the time that is left,
looks at the clock, and leaves out by name what does not fit. A part that fails says so, and the others go on. A part
that hangs or takes its process with it is left out too, and the others run in a fresh process (`gpu_parts/watch.py`).
Both files are whole after every result.

The page begins with the bars of `gpu_parts/bars.py`: pass, fail or left out, beside the figure. The exit code is 1 if a
gradient is wrong.
"""

import argparse
import sys
from collections.abc import Sequence

from gpu_parts.watch import options_of, watch

PARTS = {
    **{"equivalence": 35, "sync": 15, "step": 170, "ceilings": 10, "repeat": 15, "chunks": 10, "profile": 25},
    **{"unshared": 30, "attention": 50, "rows": 15, "trees": 60, "groups": 40, "shared": 25, "generate": 25},
    **{"short": 60, "unequal": 60, "table": 90, "checkpointing": 60, "contexts": 120},
    **{"compile": 200, "liger": 60},
}
"""Seconds that each should take; the time that is left is shared in this proportion."""
ARMS = ("padded", "padded/cudnn", "padded/flash", "packed", "cascade")
MODELS = {"0.6B": 0.2, "4B": 0.3, "8B": 0.5}
"""Of Qwen3, and their shares of the time of the parts in `SIZED`."""
SIZED = ("step", "trees", "groups", "short")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser, list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="of Qwen3")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="of steps: gpu_parts/arms.py has their names")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.until is None:
        return watch(__file__, argv, options)
    from gpu_parts.measure import measure  # torch, which takes seconds and which the watching process does without
    from gpu_parts.parts import calls

    share = sum(MODELS[name] for name in options.models)
    return measure(options, {part: PARTS[part] * (share if part in SIZED else 1) for part in PARTS}, calls)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
