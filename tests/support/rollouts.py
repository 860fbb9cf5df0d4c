"""What trainers that generate need in tests: prompts with a common beginning, a reward, a policy, both arms.

Both runs of a comparison must draw the same completions. A difference of rounding size moves a probability by as much,
so a token changes about once in a million draws, and a test draws hundreds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_harness import Comparison, Entry, Share, compare, settings
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Trainer

VOCAB_SIZE = 50
COMMON = [3, 11, 4, 14, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7, 9, 5]  # begins every prompt
GENERATIONS = 4
MAX_COMPLETION = 8
ENDS = [1, 12, 20, 28, 39]  # tokens that end a completion: many, so that completions differ in length


def save_policy(model: PreTrainedModel, folder: Path) -> Path:
    """Saves a model from which trainers load a reference, with its matrices at a quarter.

    Gradients are weighted by advantages, whose sum is zero, so they are differences. In 8 steps of GRPO and RLOO with
    the full matrices, those of two ordinary runs, one with eager attention and one with SDPA, differ by up to 1.9e-6
    and those of a shared run by up to 3.5e-6; with these by 1.3e-6 and 2.0e-6.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.0 if parameter.ndim == 1 else 0.25
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Its words are numbers of two digits; 00 pads, 01 ends."""
    words = Tokenizer(models.WordLevel({f"{n:02}": n for n in range(VOCAB_SIZE)}, unk_token="02"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="00", eos_token="01", unk_token="02")


def prompts(common: list[int] = COMMON, own: int = 0) -> Dataset:
    """8 prompts: `common`, and `own` + 2 to `own` + 8 tokens more, so that batches are padded on the left."""
    rng = np.random.default_rng(0)
    tails = [rng.integers(10, VOCAB_SIZE, own + length) for length in (2, 8, 5, 3, 6, 4, 7, 2)]
    return Dataset.from_list([{"prompt": " ".join(f"{token:02}" for token in [*common, *tail])} for tail in tails])


@dataclass
class Reward:
    """Small tokens are good. Keeps what it is given: prompts and completions of every call."""

    completions: list[list[int]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.prompts += prompts
        self.completions += completion_ids
        return [sum(token < VOCAB_SIZE // 2 for token in ids) / MAX_COMPLETION for ids in completion_ids]


def arguments(configuration: Callable[..., Any], folder: Path, **others: Any) -> Any:
    """A micro-batch is a group of 4; two of them are generated together."""
    sizes = {"num_generations": GENERATIONS, "max_completion_length": MAX_COMPLETION}
    return configuration(**settings(folder, **{**sizes, **others}))


def policy_of(folder: Path, away: float = 0.3) -> Any:
    """The saved policy, moved at random, so that the reference, which a trainer loads from `folder`, is another model.

    away: size of the move, relative to each parameter's own size.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            move = torch.randn(parameter.shape, generator=generator)
            parameter += move * away * parameter.norm() / parameter.numel() ** 0.5
    return model


def compare_rollouts(
    trainer_class: type[Trainer],
    args: Any,
    folder: Path,
    differences: dict[str, Callable[[Entry], float]],
    *,
    evaluate: bool = False,
    share_reference: bool = True,
    **others: Any,
) -> tuple[Comparison, Reward]:
    """Both arms of a trainer, with the same completions. Returns the comparison and what the reward was given.

    folder: as `save_policy` returns it. others: further arguments of the trainer.
    """
    rewards: list[Reward] = []

    def build(share: Share) -> Trainer:
        rewards.append(reward := Reward())
        model = share(policy_of(folder))
        trainer = trainer_class(model, reward, args, prompts(), prompts().select(range(4)), tokenizer(), **others)
        if trainer.ref_model is not None and share_reference:
            share(trainer.ref_model)
        return trainer

    found = compare(build, differences=differences, evaluate=evaluate)
    plain, shared = rewards
    assert plain.completions == shared.completions
    assert len(set(map(len, shared.completions))) > 1, "completions of one length need no padding"
    return found, shared
