"""`radixtrain bench` with only torch, transformers and what these need installed: no jsonargparse, no datasets.

    python recipes/benchmarks/training_step.py
    python recipes/benchmarks/training_step.py --hidden 512 --layers 2 --prompt 2048 --suffix 128
    python recipes/benchmarks/training_step.py --config configs/bench/qwen3.yaml --attention cascade --csv qwen3.csv

The first two measure one cell under every strategy. With `--config` the keys are those of the file. Every key of
`radixtrain.commands.bench.bench` except `models` is a flag too. Its value is read as YAML: `--num_sequences '[8, 16]'`.
"""

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import yaml

from radixtrain.bench.measure import ModelShape
from radixtrain.commands.bench import bench
from radixtrain.errors import UserError

SHAPE_FLAGS = {"layers": "num_hidden_layers", "hidden": "hidden_size", "vocab": "vocab_size"}
CELL_FLAGS = {"prompt": "prompt_length", "suffix": "suffix_length", "sequences": "num_sequences"}
ONE_CELL = {"models": {}, "attention": ["cascade", "path", "expand"], "repeats": 7}


def parse(argv: list[str]) -> dict[str, Any]:
    """The arguments of `bench`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path)
    for name in (*SHAPE_FLAGS, *CELL_FLAGS):
        parser.add_argument(f"--{name}", type=int)
    keys = [name for name in inspect.signature(bench).parameters if name != "models"]
    for name in keys:
        parser.add_argument(f"--{name}", type=yaml.safe_load, nargs="+" if name == "attention" else None)
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    config = flags.pop("config", None)
    options = dict(ONE_CELL) if config is None else yaml.safe_load(config.read_text(encoding="utf-8"))
    shape = {key: flags.pop(flag) for flag, key in SHAPE_FLAGS.items() if flag in flags}
    options |= {CELL_FLAGS.get(flag, flag): value for flag, value in flags.items()}
    unknown = sorted(options.keys() - {*keys, "models"})
    if unknown:
        raise UserError(f"{config}: unknown key {unknown[0]}; expected models, {', '.join(keys)}")
    return {**options, "models": [shape_of({**each, **shape}) for each in listed(options.get("models", {}))]}


def shape_of(keys: dict[str, Any]) -> ModelShape:
    try:
        return ModelShape(**keys)
    except TypeError as error:
        raise UserError(f"models: {str(error).partition('() ')[2]}") from None


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def main(argv: list[str]) -> int:
    try:
        bench(**parse(argv))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
