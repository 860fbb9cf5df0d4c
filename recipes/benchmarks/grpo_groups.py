"""What shuffling costs in GRPO: r of the micro-batches when the rows of a group scatter over them, and when not.

    python recipes/benchmarks/grpo_groups.py                     # of the plans only: seconds
    python recipes/benchmarks/grpo_groups.py --trainer           # also of TRL's GRPOTrainer with a tiny model: a minute

TRL's GRPOTrainer and RLOOTrainer generate a batch of `steps_per_generation` micro-batches at once, shuffle its rows and
cut it. A micro-batch computes a prompt once, however many rows of its group it holds. So a group of n rows with one
prompt saves n - 1 prompts if it is whole, and n - m if it is spread over m micro-batches. Three arms:

    shuffled        what TRL does
    whole groups    recipes/any_trainer/grpo_whole_groups.py: groups are shuffled, not rows
    one micro-batch per_device_train_batch_size times steps_per_generation, and no accumulation

m and `formula`, which is r of the shuffled arm, are expected values (hypergeometric). Prompts and completions are
random tokens. In one setting all prompts begin alike.
"""

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
OF_THE_TRAINER = (SETTINGS[0], SETTINGS[5], SETTINGS[7])


def random_prompts(rng: np.random.Generator, setting: Setting) -> Rows:
    """One of each group. Tokens below 3 have other uses in the tokenizer."""
    head = rng.integers(3, VOCAB_SIZE, setting.common)
    shape = setting.num_rows // setting.num_generations, setting.prompt - setting.common
    return [np.concatenate([head, own]) for own in rng.integers(3, VOCAB_SIZE, shape)]


def generation_batch(rng: np.random.Generator, setting: Setting) -> Rows:
    """Groups back to back, as a trainer generates them."""
    rows = []
    for prompt in random_prompts(rng, setting):
        completions = rng.integers(3, VOCAB_SIZE, (setting.num_generations, setting.completion))
        rows += [np.concatenate([prompt, completion]) for completion in completions]
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


def of_the_trainer(rng: np.random.Generator, setting: Setting, folder: str) -> Ratios:
    """r of the three arms in one optimizer step of TRL's GRPOTrainer, as `sharing_report` has it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "any_trainer"))
    from grpo_whole_groups import GroupedGRPOTrainer
    from trl import GRPOTrainer

    prompts = [" ".join(map(str, prompt)) for prompt in random_prompts(rng, setting)]
    small, large = (setting.batch_size, setting.steps), (setting.num_rows, 1)
    for trainer_class, sizes in ((GRPOTrainer, small), (GroupedGRPOTrainer, small), (GRPOTrainer, large)):
        yield ratio_of_a_step(trainer_class, setting, prompts, sizes, folder)


def ratio_of_a_step(
    trainer_class: Any, setting: Setting, prompts: list[str], sizes: tuple[int, int], folder: str
) -> float:
    """sizes: rows of a micro-batch, micro-batches."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from radixtrain import share_prefixes, sharing_report

    model, tokenizer = tiny_model()
    batch_size, steps = sizes
    arguments = GRPOConfig(
        folder,
        max_steps=1,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=steps,
        num_generations=setting.num_generations,
        max_completion_length=setting.completion,
        generation_kwargs={"min_new_tokens": setting.completion},
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = trainer_class(share_prefixes(model), lengths, arguments, rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return sharing_report(model).compression_ratio


def lengths(completions: list[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(completion)) for completion in completions]


def tiny_model() -> tuple[Any, Any]:
    """A Qwen3 of one layer, and a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<pad>", "<end>", "<unknown>"]
    vocabulary = {word: n for n, word in enumerate([*special, *map(str, range(3, VOCAB_SIZE))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=special[2]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, pad_token_id=0, eos_token_id=1))
    return model, PreTrainedTokenizerFast(tokenizer_object=words, **names)


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


def print_table(title: str, arms: Callable[[Setting], Ratios], settings: Iterable[Setting]) -> None:
    print(
        f"\n| {title} | prompt + completion | rows x steps | m | formula | shuffled | whole groups | one micro-batch |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for setting in settings:
        common = f" ({setting.common} common)" if setting.common else ""
        ratios = " | ".join(f"{ratio:.2f}" for ratio in arms(setting))
        print(
            f"| {setting.num_generations} generations | {setting.prompt}{common} + {setting.completion} "
            f"| {setting.batch_size} x {setting.steps} | {expected_spread(setting):.2f} | {formula(setting):.2f} "
            f"| {ratios} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, help="generation batches of each setting")
    parser.add_argument("--trainer", action="store_true", help="run TRL's GRPOTrainer with a tiny model too")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print_table("plans", lambda setting: of_the_plans(rng, setting, options.draws), SETTINGS)
    if options.trainer:
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder:
            print_table("GRPOTrainer", lambda setting: of_the_trainer(rng, setting, folder), OF_THE_TRAINER)


if __name__ == "__main__":
    main()
