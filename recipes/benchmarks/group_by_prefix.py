"""Measure what `group_by_prefix` changes: loss curves, r, speed and the noise of the gradient.

    OMP_NUM_THREADS=1 python recipes/benchmarks/group_by_prefix.py path/to/gsm8k_many_prompts_train.jsonl
    python recipes/benchmarks/group_by_prefix.py rows.jsonl --together 1 8 32 --seeds 0 1 2 --epochs 4

A tiny Qwen3 with random weights is trained on the file, once for each seed and each number of rows that stay together:
1 is a plain shuffle. All runs have the same weights at the start, the same rows and learning rates, and as many steps.
Every tenth row is held out. The training loss is the mean of the steps since the previous line, the held-out loss that
of its tokens at this step. Tokens are counted for each second of CPU time in training steps, which other programs
hardly change; with several threads it is the sum of theirs.

Then, with the weights of the first run, every order gives the gradients of an epoch of steps. The noise is their mean
squared distance from their mean, as a multiple of that of the first order: 2 says that a step of 32 rows is as
uncertain as one of 16 in that order.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
from transformers.utils.logging import disable_progress_bar

from radixtrain import share_prefixes
from radixtrain.collators.prefix_sampler import GroupedOrder
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows
from radixtrain.data.steps import StepDataset, StepSampler, conversation_groups
from radixtrain.hf.predicting_rows import forward_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

LINES = 4  # of the table, for each run
COLUMNS = ["together", "seed", "step", "train_loss", "held_out_loss", "r", "tokens_per_cpu_second"]


def main(argv: list[str]) -> None:
    options = parse(argv)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        banking77.make_start(options.file, start)
        encoded = ChatEncoder(load_tokenizer(start)).encode_all(read_rows(options.file))
        rows = [row for index, row in enumerate(encoded) if index % 10]
        held_out = [row for index, row in enumerate(encoded) if index % 10 == 0]
        groups = conversation_groups(rows)
        options.together = options.together or [1, GroupedOrder.choose(groups, options.batch_size, 0).together]
        print(f"{len(rows)} rows in {len(groups)} groups, {len(held_out)} held out; steps of {options.batch_size}")
        orders = [GroupedOrder(groups, options.batch_size, together) for together in options.together]
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        model = None
        for seed in options.seeds:
            for order in orders:
                trained = train(start, rows, held_out, order, seed, options)
                model = model or trained
        assert model is not None
        noises = [noise(model, rows, order, options) for order in orders]
    for order, each in zip(orders, noises, strict=True):
        print(f"{order.together} together: noise of the gradient {each / noises[0]:.2f}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--together", type=int, nargs="+", help="1 and the choice of group_by_prefix: true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_tokens", type=int, default=16384)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    return parser.parse_args(argv)


def steps_of(rows: Any, order: GroupedOrder, seed: int, epoch: int, max_tokens: int) -> Iterator[Step]:
    """The steps of an epoch, as `fit` draws them."""
    sampler = StepSampler(len(rows), order.batch_size, True, seed, order)
    sampler.set_epoch(epoch)
    dataset = StepDataset(rows, StepCollator(max_tokens=max_tokens))
    return (dataset[indices] for indices in sampler)


def train(
    start: Path, rows: list[list[TokenRow]], held_out: Any, order: GroupedOrder, seed: int, options: Any
) -> nn.Module:
    """The trained model; prints its lines of the table."""
    model = share_prefixes(AutoModelForCausalLM.from_pretrained(start).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    num_steps = options.epochs * -(-len(rows) // options.batch_size)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 20, num_steps)
    stops = [round(num_steps * (line + 1) / LINES) for line in range(LINES)]
    losses, seconds, num_tokens, num_computed = [], 0.0, 0, 0
    epochs = (steps_of(rows, order, seed, epoch, options.max_tokens) for epoch in range(options.epochs))
    for number, step in enumerate((step for epoch in epochs for step in epoch), 1):
        began = time.process_time()
        losses.append(backward(model, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.process_time() - began
        num_tokens, num_computed = num_tokens + step.num_tokens, num_computed + step.num_computed_tokens
        if number in stops:
            held_out_loss = evaluate(model, held_out, options)
            print(
                f"| {order.together} | {seed} | {number} | {np.mean(losses):.3f} | {held_out_loss:.3f} "
                f"| {num_tokens / num_computed:.2f} | {num_tokens / seconds:,.0f} |",
                flush=True,
            )
            losses = []
    return model


def backward(model: nn.Module, step: Step) -> float:
    """Add the gradient of a step; its loss."""
    total = 0.0
    for batch in step.micro_batches:
        loss = forward_rows(model, batch, plain_head=True).loss_sum() / step.num_labels
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Any, options: Any) -> float:
    step = StepDataset(held_out, StepCollator(max_tokens=options.max_tokens))[list(range(len(held_out)))]
    losses = (forward_rows(model, batch, plain_head=True).loss_sum().item() for batch in step.micro_batches)
    return sum(losses) / step.num_labels


def noise(model: nn.Module, rows: Any, order: GroupedOrder, options: Any) -> float:
    """Mean squared distance of the gradients of the steps of an epoch from their mean."""
    total, squares, count = torch.zeros(()), 0.0, 0
    for step in steps_of(rows, order, options.seeds[0], options.epochs, options.max_tokens):
        model.zero_grad()
        backward(model, step)
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        total, squares, count = total + gradient, squares + float(gradient.double().square().sum()), count + 1
    return squares / count - float((total.double() / count).square().sum())


if __name__ == "__main__":
    main(sys.argv[1:])
