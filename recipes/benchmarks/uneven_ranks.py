"""Calculate how the slowest rank of a step depends on the way in which rows are distributed over ranks.

    python recipes/benchmarks/uneven_ranks.py path/to/banking77_train.jsonl path/to/gsm8k_many_prompts_train.jsonl
    python recipes/benchmarks/uneven_ranks.py --batch_size 32 --num_ranks 4 16

Each file holds chats as `radixtrain fit` takes them; a tokenizer of 4,096 entries is learnt from their messages. In
addition, there are 150 agents: a common prompt of 400 tokens, 3 to 20 turns of 400, and a row for each turn, which
ends with an answer of 100. A rank has `--batch_size` rows in a step, which is one batch of each rank, of the first
epoch.

A cell: tokens of the slowest rank of an ordinary run (a shuffle, padding not counted) over unique tokens of the slowest
rank, each summed over the steps; in parentheses, unique tokens of the slowest rank over the mean of the ranks.

shuffle: batches one after the other, as Accelerate distributes them.
batch_rebalance: `train_sampling_strategy` of Hugging Face's Trainer, by lengths; ranks have unequal numbers of rows.
PrefixGroupedSampler: for one batch; with `num_batches=ranks` and together=1, the steps of the shuffle, distributed;
    with `num_batches=ranks` only, steps grouped by prompt, distributed.
fit: the steps of the shuffle, and those of `data.group_by_prefix`, as `fit` divides them; unequal numbers of rows.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from ranks import read_conversations, unique_tokens
from transformers.trainer_pt_utils import BatchRebalanceSampler

from radixtrain import PrefixGroupedSampler
from radixtrain.collators.batching import share_by_unique_tokens
from radixtrain.tree.arrays import IntArray

Rows = list[IntArray]
Step = Sequence[Sequence[int]]
"""The rows of each rank, by index."""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args(argv)
    print(f"| rows | dealt by | {' | '.join(f'{count} ranks' for count in options.num_ranks)} |")
    print("|---|---|" + "---|" * len(options.num_ranks))
    for name, rows in data_sets(options.files):
        found = [dict(ways(rows, options.batch_size, count)) for count in options.num_ranks]
        for way in found[0]:
            cells = [cell(rows, each[way], each["shuffle"]) for each in found]
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)


def data_sets(files: Sequence[Path]) -> Iterator[tuple[str, Rows]]:
    for file in files:
        yield file.stem, [ids for conversation in read_conversations(file) for ids in conversation]
    yield "agents", agents(150)


def agents(count: int) -> Rows:
    """A row for each turn of each agent."""
    draw = np.random.default_rng(0)
    system, rows = draw.integers(0, 30_000, 400), []
    for _ in range(count):
        turns = int(draw.integers(3, 21))
        history = np.concatenate([system, draw.integers(0, 30_000, turns * 400)])
        rows += [np.concatenate([history[: 400 * turn], draw.integers(0, 30_000, 100)]) for turn in range(2, turns + 2)]
    return rows


def ways(rows: Rows, batch_size: int, num_ranks: int) -> Iterator[tuple[str, list[Step]]]:
    """Whole steps of an epoch, by name."""

    size = batch_size * num_ranks

    def steps(together: int | None, num_batches: int) -> list[Step]:
        order = np.array(list(PrefixGroupedSampler(rows, batch_size, together, num_batches=num_batches)))
        return order[: len(order) // size * size].reshape(-1, num_ranks, batch_size).tolist()

    def dealt_by_fit(drawn: list[Step]) -> list[Step]:
        found = []
        for step in drawn:
            indices = [index for batch in step for index in batch]
            groups = share_by_unique_tokens([rows[index] for index in indices], num_ranks, None).groups
            found.append([[indices[place] for group in of_rank for place in group] for of_rank in groups])
        return found

    lengths = [len(row) for row in rows]
    rebalanced = [BatchRebalanceSampler(lengths, size, num_ranks, 1, rank=rank) for rank in range(num_ranks)]
    shuffled, grouped = steps(1, 1), steps(None, num_ranks)
    yield "shuffle", shuffled
    yield "batch_rebalance", list(zip(*rebalanced, strict=True))
    yield "PrefixGroupedSampler", steps(None, 1)
    yield "the same, num_batches, together=1", steps(1, num_ranks)
    yield "the same, num_batches", grouped
    yield "fit", dealt_by_fit(shuffled)
    yield "fit, group_by_prefix", dealt_by_fit(grouped)


def cell(rows: Rows, steps: list[Step], shuffled: list[Step]) -> str:
    ordinary = sum(max(sum(len(rows[index]) for index in batch) for batch in step) for step in shuffled)
    unique = [[unique_tokens(rows, batch) for batch in step] for step in steps]
    slowest, mean = sum(map(max, unique)), sum(map(sum, unique)) / len(unique[0])
    return f"{ordinary / slowest:.2f} ({slowest / mean:.2f})"


if __name__ == "__main__":
    main(sys.argv[1:])
