"""Calculate the cost of shuffling in GRPO: r of micro-batches with scattered and with whole groups.

    python recipes/benchmarks/grpo_groups.py                     # from plans, without a model: seconds

TRL's GRPOTrainer and RLOOTrainer generate a batch of `steps_per_generation` micro-batches at once, shuffle its rows and
split it. A micro-batch computes a prompt once, however many rows of its group it holds. So a group of n rows with one
prompt saves n - 1 prompts if it is whole, and n - m if it is spread over m micro-batches. Three arms:

    shuffled        what TRL does
    whole groups    recipes/any_trainer/grpo_whole_groups.py: groups are shuffled, not rows
    one micro-batch per_device_train_batch_size times steps_per_generation, and no accumulation

m and `formula`, which is r of the shuffled arm, are expected values (hypergeometric). Prompts and completions are
random tokens. In one setting all prompts begin alike.
"""

import argparse
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from radixtrain.tree.plan import build_prefix_plan

VOCAB_SIZE = 1000
Rows = list[np.ndarray]
Ratios = Iterable[float]


class Setting(NamedTuple):
    """num_generations: rows of a group. batch_size: rows of a micro-batch. steps: micro-batches of a generation batch.

    prompt, completion: tokens of each. common: tokens with which every prompt begins, counted in `prompt`.
    """

    num_generations: int
    prompt: int
    completion: int
    batch_size: int
    steps: int
    common: int = 0

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.steps

    @property
    def unit(self) -> int:
        """Rows that the shuffle of whole groups moves together: a group, or its largest part that fits."""
        return math.gcd(self.num_generations, self.batch_size)


SETTINGS = (
    Setting(8, 512, 64, 8, 4),
    Setting(8, 512, 64, 16, 4),
    Setting(8, 512, 64, 8, 8),
    Setting(8, 512, 512, 8, 4),
    Setting(8, 2048, 256, 8, 4),
    Setting(16, 512, 64, 8, 4),
    Setting(4, 512, 64, 8, 4),
    Setting(8, 512, 64, 8, 4, common=256),
)


def generation_batch(rng: np.random.Generator, setting: Setting) -> Rows:
    """Groups back to back, as a trainer generates them: a prompt each, before random completions."""
    head = rng.integers(0, VOCAB_SIZE, setting.common)
    shape = setting.num_rows // setting.num_generations, setting.prompt - setting.common
    rows = []
    for own in rng.integers(0, VOCAB_SIZE, shape):
        completions = rng.integers(0, VOCAB_SIZE, (setting.num_generations, setting.completion))
        rows += [np.concatenate([head, own, completion]) for completion in completions]
    return rows


def shuffled(rng: np.random.Generator, rows: Rows, unit: int) -> Rows:
    """The rows in random order, `unit` neighbours at a time."""
    order = rng.permutation(len(rows) // unit)
    return [rows[place * unit + offset] for place in order for offset in range(unit)]


def ratio(rows: Rows, batch_size: int) -> float:
    """r of all micro-batches together: their tokens over their unique tokens."""
    micro_batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    plans = [build_prefix_plan(np.concatenate(part), np.cumsum([0, *map(len, part)])) for part in micro_batches]
    return sum(plan.num_tokens for plan in plans) / sum(plan.num_unique_tokens for plan in plans)


def of_the_plans(rng: np.random.Generator, setting: Setting, draws: int) -> Ratios:
    """r of the three arms, the mean of `draws` generation batches."""
    arms = ((1, setting.batch_size), (setting.unit, setting.batch_size), (1, setting.num_rows))
    ratios = []
    for _ in range(draws):
        rows = generation_batch(rng, setting)
        ratios.append([ratio(shuffled(rng, rows, unit), batch_size) for unit, batch_size in arms])
    return np.mean(ratios, axis=0)


def expected_spread(setting: Setting) -> float:
    """m: over how many micro-batches a group is spread on average if its rows are drawn at random."""
    others = setting.num_rows - setting.num_generations
    missing = math.comb(others, setting.batch_size) / math.comb(setting.num_rows, setting.batch_size)
    return setting.steps * (1 - missing)


def formula(setting: Setting) -> float:
    """r of the shuffled arm: own prompts m times a group, the common beginning once a micro-batch, all completions."""
    completions = setting.num_rows * setting.completion
    own = setting.num_rows / setting.num_generations * expected_spread(setting) * (setting.prompt - setting.common)
    return (setting.num_rows * setting.prompt + completions) / (own + setting.steps * setting.common + completions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, help="generation batches of each setting")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print(
        "| generations | prompt + completion | rows x steps | m | formula | shuffled | whole groups | one micro-batch |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        common = f" ({setting.common} common)" if setting.common else ""
        ratios = " | ".join(f"{ratio:.2f}" for ratio in of_the_plans(rng, setting, options.draws))
        print(
            f"| {setting.num_generations} | {setting.prompt}{common} + {setting.completion} "
            f"| {setting.batch_size} x {setting.steps} | {expected_spread(setting):.2f} | {formula(setting):.2f} "
            f"| {ratios} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
