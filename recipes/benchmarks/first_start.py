"""Measure the time and memory from a large file to the first optimizer step of `fit`, without and with its token cache.

    python recipes/benchmarks/first_start.py --rows 200000 --prompts 20

Writes chats that share a few system prompts, and a tiny Qwen3. Then runs `fit` for one step twice. The second run uses
the tokens that the first one cached. Memory is the largest resident set of the program and of a process of it, with
the pages of the mapped file that it has touched.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from radixtrain.cores import num_cores

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

TOPICS = ["tools", "paper", "fruit", "maps", "lamps", "ropes", "tea", "shoes", "stamps", "clocks"]
VERBS = ["keep", "sell", "repair", "lend", "wrap", "count", "clean", "send", "label", "store"]


def sentence(draw: random.Random) -> str:
    keep, things, shelf = draw.choice(VERBS), draw.choice(TOPICS), draw.randrange(100)
    return f"We {keep} {things} on shelf {shelf} and never {draw.choice(VERBS)} them."


def write_rows(path: Path, rows: int, prompts: int, prompt_sentences: int) -> int:
    """JSONL of chats; returns its bytes."""
    draw = random.Random(0)
    systems = [" ".join(sentence(draw) for _ in range(prompt_sentences)) for _ in range(prompts)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            question = f"Request {number}: where do you {draw.choice(VERBS)} the {draw.choice(TOPICS)}?"
            texts = {"system": draw.choice(systems), "user": question, "assistant": sentence(draw)}
            messages = [{"role": role, "content": text} for role, text in texts.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path.stat().st_size


def one_step(folder: Path, path: Path, *options: str) -> dict[str, float]:
    """Run `fit` for one step. Seconds to its end, and its peak memory in MiB."""
    command = [sys.executable, "-m", "radixtrain", "fit", "--overwrite", "--trainer.max_steps", "1"]
    command += ["--output_dir", str(folder / "out")]
    command += ["--model.model_name_or_path", str(folder / "model"), "--data.train_file", str(path)]
    command += ["--data.cache_dir", str(folder / "cache"), *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(output)
    found = re.search(r"samples, ([\d,]+) tokens", output)
    tokens = float(found[1].replace(",", "")) if found else 0.0
    return {"seconds": time.perf_counter() - start, "MiB": usage.ru_maxrss / 1024, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt_sentences", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/first_start"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    path = arguments.folder / "chats.jsonl"
    size = write_rows(path, arguments.rows, arguments.prompts, arguments.prompt_sentences)
    banking77.make_start(path, arguments.folder / "model")
    small = arguments.folder / "one_row.jsonl"
    with path.open(encoding="utf-8") as lines:
        small.write_text(next(lines), encoding="utf-8")
    base = one_step(arguments.folder, small)  # what `fit` takes on one row: imports, calibration, a step, the export
    first, second = (one_step(arguments.folder, path) for _ in range(2))
    cores = num_cores()
    about = f"{arguments.rows:,} rows, {size >> 20:,} MiB, {arguments.prompts} prompts"
    print(f"{about}, {first['tokens']:,.0f} tokens, {cores} cores")
    print(f"{'run':<12}{'seconds of fit with one step':>30}{'without those of one row':>28}{'MiB':>8}")
    for name, run in (("one row", base), ("first", first), ("second", second)):
        print(f"{name:<12}{run['seconds']:>30.1f}{run['seconds'] - base['seconds']:>28.1f}{run['MiB']:>8.0f}")
    rate = first["tokens"] / (first["seconds"] - second["seconds"]) / cores
    print(f"tokenised: {rate:,.0f} tokens/s and core")


if __name__ == "__main__":
    main()
