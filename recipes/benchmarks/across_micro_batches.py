"""Measure the time and peak memory of steps that share prefixes across micro-batches, and of long rows.

    python recipes/benchmarks/across_micro_batches.py time
    python recipes/benchmarks/across_micro_batches.py memory
    python recipes/benchmarks/across_micro_batches.py r --files banking77_train.jsonl gsm8k_many_prompts_train.jsonl

`time`: steps whose micro-batches share a prompt, without `share_across_micro_batches`, with `auto`, and always
kept. The arms alternate, in CPU time of one thread; each ratio is of one turn. Ideal: unique tokens over computed ones.
Gradients are compared before a time is taken. `memory`: peaks of the same steps beyond weights and gradients, and of
one row of `--length` tokens, whole and in pieces of 4,096. `r`: of steps of 32 conversations, by `max_tokens`.

The model is a Qwen3 with random weights on a CPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixtrain import StepCollator, prepare_model, step_losses
from radixtrain.bench.cells import ModelShape, build_model
from radixtrain.bench.measure import DIRECT_BAR
from radixtrain.collators.steps import Step
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import read_rows
from radixtrain.hf.step_cost import step_cost_of
from radixtrain.testing import relative_error
from radixtrain.timing import header, peak_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

CPU = torch.device("cpu")
WAYS: dict[str, bool | str] = {"in each": False, "auto": "auto", "once": True}
# Tokens of the prompt and of each answer, answers, and `max_tokens`.
STEPS = {
    "few-shot": (1400, 130, 24, 2048),
    "a long prompt": (4096, 128, 24, 6144),
    "banking77": (461, 30, 32, 1024),
    "nothing to keep": (0, 600, 12, 2048),
}
BATCH_SIZE, STEPS_COUNTED, BUDGETS = 32, 16, (1024, 2048, 4096, 16384)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory", "r"])
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="chats, for `r`")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = ModelShape(options.layers, options.hidden, head_dim=64)
    model = prepare_model(build_model(shape, CPU, torch.float32, "sdpa"))
    print(header(CPU, "float32", options.repeats), end="\n\n")
    lines = {
        "time": partial(time_lines, model, options.repeats),
        "memory": partial(memory_lines, model, options.length),
        "r": partial(r_lines, model, options.files),
    }
    for line in lines[options.what]():
        print(line, flush=True)


def collated(model: Any, rows: list[dict[str, Any]], max_tokens: int, way: bool | str) -> Step:
    return StepCollator(max_tokens=max_tokens, step_cost=step_cost_of(model), share_across_micro_batches=way)(rows)


def rows_of(prompt: int, answer: int, count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    first = draw.integers(5, 4000, prompt)
    ids = [np.concatenate([first, draw.integers(5, 4000, answer)]) for _ in range(count)]
    return [{"input_ids": x, "labels": np.where(np.arange(len(x)) < len(x) - 32, -100, x)} for x in ids]


def run(model: Any, step: Step) -> float:
    """Seconds of the processor. Gradients are left."""
    model.zero_grad()
    began = time.process_time()
    for loss in step_losses(model, step):
        loss.backward()
    return time.process_time() - began


def time_lines(model: Any, repeats: int) -> Iterator[str]:
    yield "| step | max_tokens | computed in each, once | ideal | auto | once | passes of auto |"
    yield "|---|---|---|---|---|---|---|"
    for name, (prompt, answer, count, max_tokens) in STEPS.items():
        rows = rows_of(prompt, answer, count)
        steps = {way: collated(model, rows, max_tokens, wanted) for way, wanted in WAYS.items()}
        gradients = []
        for step in steps.values():
            run(model, step)
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        pairs = [pair for found in gradients[1:] for pair in zip(found, gradients[0], strict=True)]
        assert max(relative_error(found, truth) for found, truth in pairs) <= DIRECT_BAR
        turns = [{way: run(model, step) for way, step in steps.items()} for _ in range(repeats)]
        ratios = {way: statistics.median(turn["in each"] / turn[way] for turn in turns) for way in WAYS}
        computed = [steps[way].num_computed_tokens for way in ("in each", "once")]
        held = ", held" if steps["auto"].holds_graph else ""
        yield (
            f"| {name} | {max_tokens:,} | {computed[0]:,}, {computed[1]:,} | {computed[0] / computed[1]:.2f} | "
            f"{ratios['auto']:.2f} | {ratios['once']:.2f} | {len(steps['auto'].passes)}{held} |"
        )


def memory_lines(model: Any, length: int) -> Iterator[str]:
    yield "| step | max_tokens | peak in each, MiB | auto | once |"
    yield "|---|---|---|---|---|"
    for name, (prompt, answer, count, max_tokens) in STEPS.items():
        rows = rows_of(prompt, answer, count)
        peaks = [peak(model, collated(model, rows, max_tokens, wanted)) for wanted in WAYS.values()]
        yield f"| {name} | {max_tokens:,} | {' | '.join(f'{each / 2**20:,.0f}' for each in peaks)} |"
    row = rows_of(0, length, 1)
    whole, cut = (peak(model, collated(model, row, max_tokens, "auto")) for max_tokens in (length, 4096))
    sizes = f"{whole / 2**20:,.0f} | {cut / 2**20:,.0f}, {cut / whole:.2f} of it"
    yield f"| a row of {length:,} | {length:,}, 4,096 | {sizes} | - |"


def peak(model: Any, step: Step) -> int:
    """Beyond weights and gradients, which are there before."""
    model.zero_grad(set_to_none=False)
    return peak_bytes(lambda: run_again(model, step), CPU)


def run_again(model: Any, step: Step) -> None:
    for loss in step_losses(model, step):
        loss.backward()


def r_lines(model: Any, files: list[Path]) -> Iterator[str]:
    yield f"| steps of {BATCH_SIZE} | max_tokens | r in each | auto | once | best |"
    yield "|---|---|---|---|---|---|"
    for file in files:
        encoder, chats = ChatEncoder(banking77.learnt_tokenizer(file)), list(read_rows(file))
        order = np.random.default_rng(0).permutation(len(chats))[: BATCH_SIZE * STEPS_COUNTED]
        samples = list(encoder.encode_all([chats[index] for index in order]))
        batches = [samples[start : start + BATCH_SIZE] for start in range(0, len(samples), BATCH_SIZE)]
        drawn = [[{"input_ids": x.input_ids, "labels": x.labels} for each in batch for x in each] for batch in batches]
        for max_tokens in BUDGETS:
            found = {way: [collated(model, rows, max_tokens, wanted) for rows in drawn] for way, wanted in WAYS.items()}
            tokens = sum(step.num_tokens for step in found["once"])
            computed = [sum(step.num_computed_tokens for step in steps) for steps in found.values()]
            best = sum(step.num_unique_tokens or 0 for step in found["once"])
            columns = " | ".join(f"{tokens / each:.2f}" for each in [*computed, best])
            yield f"| {file.stem} | {max_tokens:,} | {columns} |"


if __name__ == "__main__":
    main(sys.argv[1:])
