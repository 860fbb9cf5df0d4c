"""Compare the predictions of `radixtrain report` with measurements of `radixtrain fit`.

    python recipes/benchmarks/report_accuracy.py --data_dir path/to/sft
    python recipes/benchmarks/report_accuracy.py --data_dir path/to/sft --layers 12 --hidden 256 --steps 12 6

On banking77 and gsm8k_many_prompts (one {"messages": [...]} a line, of `--data_dir`) and on a generated set with three
levels of sharing. For each: the speed-up that `report` predicts; then tokens/s of `fit` over that of
`fit --dedup false`, on the same batches, each the median of its steps after the first three. The commands run as a
user types them, each in its own process, one after the other. The model is a Qwen3 with random weights, the
tokenizer has 4,096 entries learnt from the rows.

Other load on the machine affects the two runs at different times, less so with `--num_threads 1`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

WARM_UP = 3  # steps that do not count
REAL = ("banking77", "gsm8k_many_prompts")


class Found(NamedTuple):
    """What a set gave. predicted, measured: speed-up of a step."""

    name: str
    r: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="of banking77_train.jsonl and gsm8k_many_prompts_train.jsonl")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/report_accuracy"))
    parser.add_argument("--num_rows", type=int, default=2000, help="first ones of each real set")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, nargs=2, default=[20, 9], help="of fit with and without deduplication")
    parser.add_argument("--num_threads", type=int)
    options = parser.parse_args(argv)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    found = [measured(path, options) for path in written_sets(options)]
    print("| set | r | predicted | measured | error |\n|---|---|---|---|---|")
    for each in found:
        print(f"| {each.name} | {each.r:.2f} | {each.predicted:.2f}x | {each.measured:.2f}x | {each.error:+.0%} |")


def written_sets(options: argparse.Namespace) -> Iterator[Path]:
    """The rows of each set, in the output folder."""
    for name in REAL if options.data_dir else ():
        path = options.output_dir / f"{name}.jsonl"
        with (options.data_dir / f"{name}_train.jsonl").open(encoding="utf-8") as file:
            path.write_text("".join(islice(file, options.num_rows)), encoding="utf-8")
        yield path
    path = options.output_dir / "nested.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in nested_chats()), encoding="utf-8")
    yield path


def nested_chats(departments: int = 5, documents: int = 8, questions: int = 30) -> list[dict[str, Any]]:
    """Chats whose prompts share a policy, then one of the departments, then one of its documents."""
    draw = random.Random(0)
    words = ["".join(draw.choice("bdfklmnprst") + draw.choice("aeiou") for _ in range(2)) for _ in range(300)]

    def text(num_words: int) -> str:
        return " ".join(draw.choices(words, k=num_words)).capitalize() + "."

    policy, rows = text(160), []
    for department in (text(120) for _ in range(departments)):
        for document in (text(100) for _ in range(documents)):
            system = f"{policy}\n\n{department}\n\n{document}"
            for _ in range(questions):
                turns = {"system": system, "user": text(draw.randint(6, 24)), "assistant": text(draw.randint(4, 40))}
                rows.append({"messages": [{"role": role, "content": content} for role, content in turns.items()]})
    return rows


def measured(path: Path, options: argparse.Namespace) -> Found:
    """Predict, then train with and without deduplication."""
    folder = options.output_dir / f"{path.stem}-{options.layers}x{options.hidden}"
    banking77.make_start(path, folder / "start", options.layers, options.hidden)
    common = {
        "model.model_name_or_path": folder / "start",
        "data.train_file": path,
        "data.batch_size": options.batch_size,
    }
    printed = run("report", {"output_dir": folder / "report", **common}, options)
    predicted = re.search(r"predicted to run at ([\d.,]+)x", " ".join(printed.split()))
    assert predicted is not None, printed
    rates = {dedup: tokens_per_second(folder, common, dedup, options) for dedup in ("true", "false")}
    r = statistics.median(row["r"] for row in rates["true"])
    fast, slow = (statistics.median(row["tokens_per_second"] for row in rates[dedup]) for dedup in ("true", "false"))
    found = Found(path.stem, r, float(predicted[1].replace(",", "")), fast / slow)
    print(f"{found.name}: predicted {found.predicted:.2f}x, measured {found.measured:.2f}x", flush=True)
    return found


def tokens_per_second(
    folder: Path, common: dict[str, Any], dedup: str, options: argparse.Namespace
) -> list[dict[str, float]]:
    """What `fit` logged for each step after the warm-up."""
    steps = options.steps[dedup == "false"]
    trainer = {"max_steps": steps, "log_every_n_steps": 1, "enable_checkpointing": "false"}
    flags = {"output_dir": folder / dedup, "dedup": dedup, **common, **{f"trainer.{k}": v for k, v in trainer.items()}}
    run("fit", flags, options)
    newest = max((folder / dedup / "logs").glob("version_*/metrics.csv"), key=lambda file: file.stat().st_mtime)
    with newest.open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]][WARM_UP:]
    return [{name: float(row[name]) for name in ("r", "tokens_per_second")} for row in rows]


def run(command: str, flags: dict[str, Any], options: argparse.Namespace) -> str:
    """What a command of radixtrain prints."""
    threads = {} if options.num_threads is None else {"OMP_NUM_THREADS": str(options.num_threads)}
    typed = [sys.executable, "-m", "radixtrain", command, *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(typed, capture_output=True, text=True, env={**os.environ, **threads})
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
