"""What one GPU says about radixtrain: is it the same, how fast is it beside what else, and where does the time go?

    python recipes/benchmarks/gpu.py --json gpu.json      # and gpu.md, the same for people
    python recipes/benchmarks/gpu.py --parts step --models 4B --arms padded/cudnn packed/torch cascade/torch path/torch
    python recipes/benchmarks/gpu.py --device cpu --tiny  # the same code, in a minute

Needs torch (2.10 or newer), transformers and numpy; other kernels are measured if they are installed. Nothing is
downloaded: weights and tokens are random. on-a-gpu.md has the commands for a card that is there for 15 minutes.

Parts, in their order; `gpu_parts/` says what each measures. `seconds` is what an H100 should take.

| part          | seconds | what                                                                           |
|---------------|---------|--------------------------------------------------------------------------------|
| `equivalence` | 35      | gradients of every strategy and kernel in bfloat16, against float64            |
| `table`       | 60      | DualKV's table of one layer of attention                                       |
| `profile`     | 25      | kernels of one forward pass and of one step of each arm                        |
| `step`        | 300     | steps and forward passes of Qwen3-0.6B, 4B and 8B shapes, beside every rival   |
| `trees`       | 120     | an agent's history with an answer after each of 20 turns                       |
| `groups`      | 80      | 8 answers to one prompt, as in RL                                              |
| `hf`          | 60      | Hugging Face's Trainer: padded, padding-free, and with radixtrain's two lines  |
| `sft`         | 80      | TRL's SFTTrainer: padded, padding_free, packing, and the same two lines        |
| `dpo`         | 40      | TRL's DPOTrainer, and with share_prefixes                                      |
| `real`        | 100     | SmolLM2-135M-Instruct on banking77, to its accuracy on the test rows           |
| `liger`       | 40      | all arms with Liger's layers                                                   |
| `compile`     | 150     | all arms under torch.compile, after `liger`: compiling may take all the time   |

`hf` needs accelerate, `sft` and `dpo` trl and datasets, `real` a folder (`--real`) with weights and rows:
`gpu_wheels.py` fetches them for a machine without a network. Padded arms of trainers run on `sdpa` as torch chooses;
the page says which backend that is.

All parts take 18 minutes: ask for some, or for more `--seconds`. Each part gets its share of the time that is left,
looks at the clock, and leaves out by name what does not fit, the last arms first. A part that fails says so, and the
others go on. A part that hangs or takes its process with it is left out too, and the others run in a fresh process
(`gpu_parts/watch.py`). Both files are whole after every result.

The page begins with the bars of `gpu_parts/bars.py`: pass, fail or left out, beside the figure. The exit code is 1 if a
gradient is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.watch import options_of, watch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # banking77, of `real`

PARTS = {
    **{"equivalence": 35, "table": 60, "profile": 25, "step": 300, "trees": 120, "groups": 80},
    **{"hf": 60, "sft": 80, "dpo": 40, "real": 100, "liger": 40, "compile": 150},
}
"""Seconds that each should take; the time that is left is shared in this proportion."""
ARMS = ("padded/cudnn", "cascade/torch", "packed/torch", "cascade/cudnn", "path/torch", "padded/flash")
MODELS = {"0.6B": 0.2, "4B": 0.3, "8B": 0.5}
"""Of Qwen3, and their shares of the time of the parts in `SIZED`."""
SIZED = ("step", "trees", "groups")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser, list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="of Qwen3")
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), help="most wanted first: gpu_parts/arms.py has the names"
    )
    parser.add_argument("--steps", type=int, default=30, help="of a trainer")
    parser.add_argument("--kernel", default="torch", help="of a trainer's arms, ours and those without padding")
    parser.add_argument("--real", type=Path, help="folder with the weights and rows of `real`")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.until is None:
        return watch(__file__, argv, options)
    from gpu_parts.parts import calls
    from gpu_parts.run import measure  # torch, which takes seconds and which the watching process does without

    share = sum(MODELS[name] for name in options.models)
    return measure(options, {part: PARTS[part] * (share if part in SIZED else 1) for part in PARTS}, calls)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
