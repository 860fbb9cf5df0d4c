"""What trainers that generate need in tests: prompts with a common beginning, a reward, a policy, both arms.

Both runs of a comparison must draw the same completions: in float64 a probability moves by 1e-15, so they do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import tiny_qwen3
from trainer_harness import Comparison, Share, compare, settings

VOCAB_SIZE = 50
COMMON = [3, 11, 4, 14, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7, 9, 5]  # begins every prompt
GENERATIONS = 4
MAX_COMPLETION = 8
ENDS = [1, 12, 20, 28, 39]  # tokens that end a completion: many, so that completions differ in length
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def save_reference(folder: Path) -> Path:
    """The folder from which trainers load the reference, which is another model than the policy."""
    reference = tiny_qwen3(seed=1)
    reference.generation_config.eos_token_id = ENDS
    reference.save_pretrained(folder)
    return folder


def policy_of(folder: Path, make: Callable[[int], Any] = tiny_qwen3, ends: list[int] = ENDS) -> Any:
    """A policy whose reference is in `folder`. ends: tokens that end a completion."""
    policy = make(0)
    policy.config._name_or_path = str(folder)
    policy.generation_config.eos_token_id = ends
    return policy


def tokenizer() -> Any:
    """Its words are numbers of two digits; 00 pads, 01 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"{n:02}": n for n in range(VOCAB_SIZE)}, unk_token="02"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="00", eos_token="01", unk_token="02")


def prompts(common: list[int] = COMMON, own: int = 0) -> Any:
    """8 prompts: `common`, and `own` + 2 to `own` + 8 tokens more, so that batches are padded on the left."""
    from datasets import Dataset

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


def compare_rollouts(
    trainer_class: type[Any],
    args: Any,
    folder: Path,
    *,
    evaluate: bool = False,
    share_reference: bool = True,
    make: Callable[[int], Any] = tiny_qwen3,
    **others: Any,
) -> Comparison:
    """Both arms of a trainer, with the same completions.

    folder: as `save_reference` returns it. make: the policy. others: further arguments of the trainer.
    """
    rewards: list[Reward] = []

    def build(share: Share) -> Any:
        rewards.append(reward := Reward())
        model = share(policy_of(folder, make))
        trainer = trainer_class(model, reward, args, prompts(), prompts().select(range(4)), tokenizer(), **others)
        if trainer.ref_model is not None:
            share(trainer.ref_model) if share_reference else trainer.ref_model.double()
        return trainer

    found = compare(build, evaluate=evaluate)
    plain, shared = rewards
    assert plain.completions == shared.completions
    assert len(set(map(len, shared.completions))) > 1, "completions of one length need no padding"
    return found
