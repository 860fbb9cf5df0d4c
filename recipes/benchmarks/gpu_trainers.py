"""What a GPU says about trainers of other people: the same training with radixtrain and without.

    python recipes/benchmarks/gpu_trainers.py --json trainers.json    # and trainers.md, the same for people
    python recipes/benchmarks/gpu_trainers.py --device cpu --tiny     # the same code, in a minute

Needs torch, transformers and accelerate for `hf`; trl and datasets for `sft`, `dpo` and `grpo`, which are left out
without them (`gpu_wheels.py` fetches both for a machine without a network). `real` needs a folder (`--real`) with
weights and rows, which `gpu_parts/real.py` describes. Clock, parts and files are those of `gpu.py`.

| part      | seconds | what                                                                                   |
|-----------|---------|----------------------------------------------------------------------------------------|
| `profile` | 20      | kernels of the last step of `grpo`, and how long the device waits in it                |
| `hf`      | 60      | Hugging Face's Trainer: padded, padding-free, and with RadixCollator and share_prefixes |
| `sft`     | 80      | TRL's SFTTrainer: padded, padding_free, packing, and the same two lines                |
| `real`    | 100     | SmolLM2-135M-Instruct on banking77, to its accuracy on the test rows                   |
| `dpo`     | 40      | TRL's DPOTrainer, and with share_prefixes                                              |
| `grpo`    | 40      | TRL's GRPOTrainer on groups of 8 x (1,024 + 1,024), and with share_prefixes            |

Padded arms run on `sdpa` as torch chooses, like the trainer of a user; the page says which backend that is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.watch import options_of, watch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # banking77, of `real`

PARTS = {"profile": 20, "hf": 60, "sft": 80, "real": 100, "dpo": 40, "grpo": 40}
"""Seconds that each should take; the time that is left is shared in this proportion."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser, list(PARTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kernel", default="torch", help="of ours, by cascade, and of arms without padding")
    parser.add_argument("--real", type=Path, help="folder with the weights and rows of `real`")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.until is None:
        return watch(__file__, argv, options)
    from gpu_parts.measure import measure  # torch, which takes seconds and which the watching process does without
    from gpu_parts.trainer_parts import calls

    return measure(options, PARTS, calls)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
