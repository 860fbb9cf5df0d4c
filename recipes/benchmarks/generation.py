"""Compare greedy generation with a radix cache and with Hugging Face, on one thread with alternating arms.

    export OMP_NUM_THREADS=1
    python recipes/benchmarks/generation.py real --model MODEL --file banking77_test.jsonl --prompts 64
    python recipes/benchmarks/generation.py grid      # shared length x number of prompts: a quarter of an hour
    python recipes/benchmarks/generation.py apart     # prompts that share nothing

`real` answers the chats of a file; `python recipes/banking77.py --data_dir DIR` writes MODEL to
runs/banking77/sft/model in minutes. `--model start` learns a tokenizer from the file and draws the weights instead:
the same speed, as long as answers do not end. `grid` and `apart` use a random Qwen3 with 4 layers of width 512 and
random prompts.

The arms alternate: `radix` is `radixtrain.generate`; `generate` is `model.generate` (sdpa, prompts sorted by length)
with the batch size that was fastest in a trial; `generate_batch` is continuous batching, whose requests share whole
pages (`allow_block_sharing`), including its start and stop. All answers are compared: those that differ are counted,
with the largest gap of the two best logits where they diverge (float64). The ideal counts operations only; that shared
keys and values are read once is not in it, nor that a step with few sequences takes as long as reading the weights,
which both arms do alike. r counts the tokens of the answers too.

Slow arms answer only some of the prompts and their time is multiplied; the table says how many were timed. In `grid`
and `apart`, `generate` gets prompts of `--most_tokens` tokens in all; `generate_batch` the first `--block_prompts`.
"""

import argparse
import csv
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import generation_arms as arms
import numpy as np
import torch
from step import ModelShape, build_model
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from radixtrain.data.chat import load_tokenizer
from radixtrain.data.files.sources import read_rows
from radixtrain.errors import UserError
from radixtrain.timing import environment, header

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

SHARED, BATCHES = (0, 256, 1024, 4096), (1, 8, 32, 128)  # as in the figures of the Hydragen paper
OWN_APART, BATCHES_APART = (16, 128, 512), (1, 8, 32)
VOCAB_SIZE = 4096


class Work(NamedTuple):
    """Prompts to answer with `num_new` tokens each. targets: the right answers, if they are known."""

    name: str
    prompts: arms.Ids
    num_new: int
    targets: list[str] | None = None
    tokenizer: Any = None


@dataclass(frozen=True)
class Result:
    """seconds: of every turn of an arm, for all prompts. num_timed: prompts that an arm answered in fact."""

    work: Work
    r: float
    ideal: float
    batch_size: int
    num_timed: dict[str, int]
    seconds: dict[str, list[float]]
    agreement: dict[str, arms.Agreement]
    exact_match: float | None

    def speedup_over(self, arm: str) -> tuple[float, float, float]:
        """Median, lowest and highest ratio of the turns."""
        ratios = [one / radix for one, radix in zip(self.seconds[arm], self.seconds["radix"], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def main(argv: list[str]) -> int:
    options = parse(argv)
    disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(options.num_threads)
    gc.collect()
    gc.freeze()  # generate_batch collects garbage twice; going through all imported modules would be its time
    print(header(torch.device("cpu"), "float32", options.repeats), flush=True)
    try:
        report(results(options), options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["real", "grid", "apart"])
    parser.add_argument("--model", help="real: a folder, or `start` for random weights")
    parser.add_argument("--file", type=Path, help="real: chats that end with an answer")
    parser.add_argument("--prompts", type=int, default=64, help="real: the first so many; 0 for all")
    parser.add_argument("--max_new_tokens", type=int, help="default: 24 (real), 32 (grid, apart)")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="to try")
    parser.add_argument("--page_size", type=int, default=256, help="of generate_batch; tokens")
    parser.add_argument("--block_prompts", type=int, default=256, help="real: for generate_batch; 0: without it")
    parser.add_argument("--shared", type=int, nargs="+", default=list(SHARED), help="grid: shared tokens")
    parser.add_argument("--own", type=int, nargs="+", help="tokens after the shared ones; default: 16 (grid)")
    parser.add_argument("--batches", type=int, nargs="+", help="grid, apart: numbers of prompts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--most_tokens", type=int, default=32_768, help="grid, apart: of an ordinary arm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    return parser.parse_args(argv)


def results(options: argparse.Namespace) -> Iterator[Result]:
    if options.part == "real":
        model, work = real_work(options)
        yield measure(model, work, options, len(work.prompts), options.block_prompts)
        return
    shape = ModelShape(options.layers, options.hidden, vocab_size=VOCAB_SIZE)
    model = build_model(shape, torch.device("cpu"), torch.float32).eval()
    for work in random_works(options):
        longest = max(map(len, work.prompts)) + work.num_new
        yield measure(model, work, options, max(1, options.most_tokens // longest))


def real_work(options: argparse.Namespace) -> tuple[Any, Work]:
    """The model, and the prompts of a file as `fit` renders them."""
    if options.model is None or options.file is None:
        raise UserError("real: --model and --file are needed")
    rows = [row.fields["messages"] for row in read_rows(options.file)][: options.prompts or None]
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "start":
            banking77.make_start(options.file, Path(folder) / "start")
        model_folder = Path(folder) / "start" if options.model == "start" else options.model
        tokenizer = load_tokenizer(model_folder)
        model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa").eval()
    chats = [messages[:-1] for messages in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    targets = [messages[-1]["content"] for messages in rows]
    return model, Work(
        f"{len(prompts)} of {options.file.stem}", prompts, options.max_new_tokens or 24, targets, tokenizer
    )


def random_works(options: argparse.Namespace) -> Iterator[Work]:
    """Prompts of the grid: some shared tokens, then others whose first one differs."""
    is_grid = options.part == "grid"
    rng = np.random.default_rng(0)
    for shared in options.shared if is_grid else (0,):
        for own in options.own or ((16,) if is_grid else OWN_APART):
            for number in options.batches or (BATCHES if is_grid else BATCHES_APART):
                common = rng.integers(0, VOCAB_SIZE, shared).tolist()
                tails = rng.integers(0, VOCAB_SIZE, (number, own))
                tails[:, 0] = rng.permutation(VOCAB_SIZE)[:number]
                prompts = [[*common, *tail] for tail in tails.tolist()]
                yield Work(f"{number} x ({shared} + {own})", prompts, options.max_new_tokens or 32)


def measure(model: Any, work: Work, options: argparse.Namespace, most_prompts: int, block_prompts: int = 0) -> Result:
    """The arms in turns. Before that `radix` runs once and `generate` has a trial, without being counted.

    most_prompts, block_prompts: that `generate` and `generate_batch` answer at most.
    """
    prompts, num_new = work.prompts, work.num_new
    some = {name: prompts[:number] for name, number in (("generate", most_prompts), ("generate_batch", block_prompts))}
    trial = arms.best_batch_size(model, some["generate"], num_new, options.batch_sizes)
    batch_size = min(trial, key=trial.__getitem__)
    print(f"{work.name}: generate takes {spelled(trial)}", file=sys.stderr, flush=True)
    running = {"radix": arms.radix, "generate": arms.padded(batch_size)}
    if block_prompts:
        running["generate_batch"] = arms.blocks(options.page_size)
    answers = {"radix": arms.radix(model, prompts, num_new)}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(options.repeats):
        for name, arm in running.items():
            given = some.get(name, prompts)
            began = time.perf_counter()
            answers[name] = arm(model, given, num_new)
            seconds[name].append((time.perf_counter() - began) * len(prompts) / len(given))
    ideal = arms.ideal_of(model.config, prompts, answers["radix"])
    agreement = {
        name: arms.agreement(model, some[name], answers["radix"], answers[name]) for name in running if name in some
    }
    timed = {name: len(given) for name, given in some.items()}
    return Result(work, ideal.r, ideal.speedup, batch_size, timed, seconds, agreement, exact_match(work, answers))


def exact_match(work: Work, answers: dict[str, arms.Ids]) -> float | None:
    """Of the radix arm, with the blanks around an answer left out."""
    if work.targets is None:
        return None
    texts = work.tokenizer.batch_decode(answers["radix"], skip_special_tokens=True)
    return sum(text.strip() == target for text, target in zip(texts, work.targets, strict=True)) / len(texts)


def spelled(trial: dict[int, float]) -> str:
    """In milliseconds for each prompt."""
    return ", ".join(f"{1000 * seconds:.1f} ms a prompt in a batch of {size}" for size, seconds in trial.items())


def report(found: Iterator[Result], options: argparse.Namespace) -> None:
    """Print a line for each result and arm as they come, and write all of them to `--csv`."""
    lines: list[dict[str, Any]] = []
    shown = ("prompts", "arm", "radix s", "its s", "r", "ideal", "speed-up", "of the ideal", "timed", "differ")
    print("", *("| " + " | ".join(row) + " |" for row in (shown, ["---"] * len(shown))), sep="\n", flush=True)
    for result in found:
        for arm in result.agreement:
            lines.append(line_of(result, arm, options))
            print("| " + " | ".join(cells_of(lines[-1])) + " |", flush=True)
        if result.exact_match is not None:
            print(f"exact match: {result.exact_match:.1%}", flush=True)
        if options.csv is not None:
            with options.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, lines[0])
                writer.writeheader()
                writer.writerows(lines)


def line_of(result: Result, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Column to value, in full precision."""
    median, lowest, highest = result.speedup_over(arm)
    is_padded = arm == "generate"
    return {
        "part": options.part,
        "work": result.work.name,
        "prompts": len(result.work.prompts),
        "prompt_tokens": sum(map(len, result.work.prompts)),
        "max_new_tokens": result.work.num_new,
        "arm": arm,
        "batch_size": result.batch_size if is_padded else None,
        "page_size": None if is_padded else options.page_size,
        "radix_seconds": statistics.median(result.seconds["radix"]),
        "arm_seconds": statistics.median(result.seconds[arm]),
        "r": result.r,
        "ideal": result.ideal,
        "speedup": median,
        "lowest_speedup": lowest,
        "highest_speedup": highest,
        "prompts_timed": result.num_timed[arm],
        "num_different": result.agreement[arm].num_different,
        "largest_gap": result.agreement[arm].largest_gap,
        "exact_match": result.exact_match,
        "repeats": options.repeats,
        **environment(torch.device("cpu"), "float32"),
    }


def cells_of(line: dict[str, Any]) -> list[str]:
    name = f"generate, batches of {line['batch_size']}" if line["arm"] == "generate" else line["arm"]
    differ = f"{line['num_different']} of {line['prompts_timed']}"
    return [
        f"{line['work']}",
        name,
        f"{line['radix_seconds']:.3f}",
        f"{line['arm_seconds']:.3f}",
        f"{line['r']:.2f}",
        f"{line['ideal']:.2f}",
        f"{line['speedup']:.2f} ({line['lowest_speedup']:.2f} to {line['highest_speedup']:.2f})",
        f"{line['speedup'] / line['ideal']:.2f}",
        f"{line['prompts_timed']}",
        f"{differ} (gap {line['largest_gap']:.0e})" if line["num_different"] else "none",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
