"""One cell of `python -m radixtrain bench`, by the names that this script had before the command was there.

python recipes/benchmarks/training_step.py
python recipes/benchmarks/training_step.py --hidden 512 --layers 2 --prompt 2048 --suffix 128
"""

import argparse
import sys

from radixtrain.__main__ import main

KEYS = {
    "layers": ("models.num_hidden_layers", 4),
    "hidden": ("models.hidden_size", 256),
    "vocab": ("models.vocab_size", 4096),
    "prompt": ("prompt_length", 512),
    "suffix": ("suffix_length", 64),
    "sequences": ("num_sequences", 16),
    "repeats": ("repeats", 7),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, default) in KEYS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", nargs="+", default=["cascade", "path", "expand"])
    options = parser.parse_args()
    keys = [f"--{key}={getattr(options, name)}" for name, (key, _) in KEYS.items()]
    sys.exit(main(["bench", *keys, f"--attention=[{', '.join(options.attention)}]"]))
