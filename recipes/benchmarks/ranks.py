"""Calculate how well `fit` divides the steps of an epoch among ranks, without running a model.

    python recipes/benchmarks/ranks.py path/to/banking77_train.jsonl path/to/gsm8k_many_prompts_train.jsonl
    python recipes/benchmarks/ranks.py train.jsonl --batch_size 64 128 256 --num_ranks 1 2
    python recipes/benchmarks/ranks.py train.jsonl --per_rank
    python recipes/benchmarks/ranks.py train.jsonl --split

Each file holds chats as `radixtrain fit` takes them; a tokenizer of 4,096 entries is learnt from their messages. With
`--per_rank` a step has `--batch_size` conversations for each rank, otherwise in all. For each number of ranks, over
the steps of one epoch:

imbalance: unique tokens of the rank that has most over the mean of the ranks; the mean over the steps.
r: tokens per computed token, of all ranks; and over that of one rank with the same steps.
speed-up: unique tokens of the steps on one rank over those of the rank that has most; communication costs nothing.
weight zero: micro-batches of weight zero in a step, which ranks run because another rank has more.
cut: processor milliseconds that a rank takes to cut a step, median; in a DataLoader worker, ahead of the training step.

`--split` compares data parallelism with sequence parallelism, which splits the rows of a step over the ranks, filled
up to equal parts; a micro-batch then has room on all of them. *worst* is the rows of the rank that has most, filling
left out, over the mean of the ranks; the mean over the steps.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from radixtrain.collators.batching import Shares, share_by_unique_tokens
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import read_rows
from radixtrain.data.steps import StepSampler
from radixtrain.tree.arrays import IntArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

WEIGHTLESS_ROWS = 2  # of a micro-batch of weight zero
MEANS = ("imbalance", "num_weightless")


class Divided(NamedTuple):
    """A step on several ranks. costs: by rank. rows: computed by all of them. milliseconds: of the cut."""

    costs: list[int]
    rows: int
    num_weightless: int
    milliseconds: float

    @property
    def imbalance(self) -> float:
        return max(self.costs) * len(self.costs) / sum(self.costs)


HEAD = """\
| set | conversations in a step | ranks | steps | imbalance | r | over r of one | speed-up | weight zero | cut, ms |
|---|---|---|---|---|---|---|---|---|---|"""

HEAD_OF_SPLIT = """\
| set | conversations in a step | ranks | data parallel: r | over r of one | worst | split: r | over r of one | worst |
|---|---|---|---|---|---|---|---|---|"""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[64])
    parser.add_argument("--per_rank", action="store_true", help="so many conversations for each rank")
    parser.add_argument(
        "--split", action="store_true", help="compare with rows of a step that are split over the ranks"
    )
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--max_tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(argv)
    print(HEAD_OF_SPLIT if options.split else HEAD, flush=True)
    line_of = split_line if options.split else line
    for file in options.files:
        conversations = read_conversations(file)
        for batch_size in options.batch_size:
            for num_ranks in options.num_ranks:
                size = batch_size * (num_ranks if options.per_rank else 1)
                steps = steps_of(conversations, size, options.seed)
                print(line_of(file.stem, size, num_ranks, list(steps), options), flush=True)


def read_conversations(file: Path) -> list[list[IntArray]]:
    """The token ids of the samples of each conversation."""
    encoded = ChatEncoder(banking77.learnt_tokenizer(file)).encode_all(read_rows(file))
    return [[sample.input_ids for sample in samples] for samples in encoded]


def steps_of(conversations: list[list[IntArray]], batch_size: int, seed: int) -> Iterator[list[IntArray]]:
    """The sequences of each step of the first epoch."""
    for indices in StepSampler(len(conversations), batch_size, shuffle=True, seed=seed):
        yield [sequence for index in indices for sequence in conversations[index]]


def line(name: str, size: int, num_ranks: int, steps: list[list[IntArray]], options: argparse.Namespace) -> str:
    """Of the table: how an epoch divides. The means of its steps, except for the cut, a median."""
    one = [divided(step, 1, options.max_tokens) for step in steps]
    found = [divided(step, num_ranks, options.max_tokens) for step in steps]
    num_tokens = sum(len(sequence) for step in steps for sequence in step)
    rows, rows_of_one = (sum(step.rows for step in each) for each in (found, one))
    imbalance, weightless = (statistics.mean(getattr(step, name) for step in found) for name in MEANS)
    speed_up = sum(step.costs[0] for step in one) / sum(max(step.costs) for step in found)
    return (
        f"| {name} | {size:,} | {num_ranks} | {len(steps)} | {imbalance:.3f} | {num_tokens / rows:.2f} "
        f"| {rows_of_one / rows:.3f} | {speed_up:.2f}x | {weightless:.1f} "
        f"| {statistics.median(step.milliseconds for step in found):.1f} |"
    )


def split_line(name: str, size: int, num_ranks: int, steps: list[list[IntArray]], options: argparse.Namespace) -> str:
    """Of the table of `--split`: rows of each rank by data parallel, and by splitting every micro-batch."""
    budget = options.max_tokens
    num_tokens = sum(len(sequence) for step in steps for sequence in step)
    rows_of_one = sum(map(sum, (data_parallel_rows(step, 1, budget) for step in steps)))
    cells = []
    for way in (data_parallel_rows, split_rows):
        rows = [way(step, num_ranks, budget) for step in steps]
        filled = way is split_rows  # to as many as the rank that has most
        computed = num_ranks * sum(map(max, rows)) if filled else sum(map(sum, rows))
        worst = statistics.mean(max(ranks) * num_ranks / sum(ranks) for ranks in rows)
        cells.append(f"{num_tokens / computed:.2f} | {rows_of_one / computed:.3f} | {worst:.3f}")
    return f"| {name} | {size:,} | {num_ranks} | {' | '.join(cells)} |"


def data_parallel_rows(sequences: Sequence[IntArray], num_ranks: int, max_tokens: int) -> list[int]:
    """Unique tokens of each rank, in micro-batches of its own."""
    groups = share_by_unique_tokens(sequences, num_ranks, max_tokens).groups
    return [sum(unique_tokens(sequences, group) for group in of_rank) for of_rank in groups]


def split_rows(sequences: Sequence[IntArray], num_ranks: int, max_tokens: int) -> list[int]:
    """Unique tokens of each rank, of micro-batches that all ranks compute together."""
    (groups,) = share_by_unique_tokens(sequences, 1, num_ranks * max_tokens).groups
    rows = [0] * num_ranks
    for group in groups:
        left = unique_tokens(sequences, group)
        part = -(-left // num_ranks)
        for rank in range(num_ranks):
            own = min(part, left)
            rows[rank], left = rows[rank] + own, left - own
    return rows


def divided(sequences: Sequence[IntArray], num_ranks: int, max_tokens: int) -> Divided:
    start = time.process_time()
    shares = share_by_unique_tokens(sequences, num_ranks, max_tokens)
    milliseconds = 1e3 * (time.process_time() - start)
    num_weightless = sum(shares.num_micro_batches - len(groups) for groups in shares.groups)
    rows = computed_rows(sequences, shares) + num_weightless * WEIGHTLESS_ROWS
    return Divided(shares.costs, rows, num_weightless, milliseconds)


def computed_rows(sequences: Sequence[IntArray], shares: Shares) -> int:
    """Unique tokens of every micro-batch by itself."""
    return sum(unique_tokens(sequences, group) for mine in shares.groups for group in mine)


def unique_tokens(sequences: Sequence[IntArray], group: Sequence[int]) -> int:
    (rows,) = share_by_unique_tokens([sequences[index] for index in group], 1, None).costs
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
