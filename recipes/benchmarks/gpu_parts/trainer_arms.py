"""The arms that `trainers.py` compares: of Hugging Face's Trainer, and of TRL's trainers for SFT and DPO.

Ours is the second of each, so that it is measured even if the time ends early.

Random weights, and rows of random tokens that all begin with the same prompt, equally long.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_parts.arms import packed_implementation
from gpu_parts.batches import one_prompt
from gpu_parts.run import optional
from gpu_parts.trainers import OTHER_ORDER, reversed_rows
from step import ModelShape, build_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from radixtrain import RadixCollator, share_prefixes

__all__ = ["Setting", "dpo_arms", "hf_arms", "sft_arms"]

Arms = dict[str, Callable[[], Trainer]]
SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = 4096  # of the tokenizer, at most


@dataclass(frozen=True)
class Setting:
    """What is trained. prompt, own: tokens. rows: of a batch. folder: for what a trainer writes. kernel: by name."""

    shape: ModelShape
    prompt: int
    own: int
    rows: int
    steps: int
    device: torch.device
    folder: Path
    kernel: str

    @property
    def choice(self) -> dict[str, str]:
        """Of our arms: never `auto`, which depends on what is installed."""
        return {"attention": "cascade", "kernel": self.kernel}

    def named(self, arm: str) -> str:
        return f"{arm} {'/'.join(self.choice.values())}"

    def packed(self) -> Any:
        """The model for rows without padding."""
        return self.model(packed_implementation(self.kernel, self.device))

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.own)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of every trainer: the same batches in the same order, bfloat16, and a log of each step."""
        return {
            **{"output_dir": str(self.folder), "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
            **{"max_steps": self.steps, "per_device_train_batch_size": self.rows, "seed": 0},
            **{"learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_steps": 1},
            **{"bf16": True, "use_cpu": self.device.type == "cpu", "remove_unused_columns": False},
            **{"gradient_checkpointing": False, "accelerator_config": {"non_blocking": True}},
        }

    def model(self, attn_implementation: str = "sdpa") -> Any:
        return build_model(self.shape, self.device, torch.bfloat16, attn_implementation)

    def features(self) -> list[dict[str, list[int]]]:
        """Rows of all steps."""
        batch = one_prompt(self.prompt, self.own, self.rows * self.steps)
        return [{name: column.tolist() for name, column in row.items()} for row in batch.features(self.shape)]

    def texts(self) -> tuple[str, list[str]]:
        """A prompt, and for each row of all steps a text as long as its own tokens."""
        rng = np.random.default_rng(0)
        prompt, *owns = (
            " ".join(f"w{number}" for number in rng.integers(len(SPECIAL), self.num_words, length))
            for length in (self.prompt, *[self.own] * (2 * self.rows * self.steps))
        )
        return prompt, owns

    @property
    def num_words(self) -> int:
        return min(WORDS, self.shape.vocab_size)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A word is a token."""
        words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), self.num_words))]
        backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )


def hf_arms(setting: Setting) -> Arms:
    """Trainer on padded batches, without padding (transformers' own collator), and with the two lines of radixtrain."""
    arguments = TrainingArguments(**setting.arguments, train_sampling_strategy="sequential")
    rows = setting.features()

    def trainer(model: Any, collate: Any) -> Trainer:
        return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)

    return {
        "padded": lambda: trainer(setting.model(), default_data_collator),
        setting.named("radixtrain"): lambda: trainer(
            share_prefixes(setting.model(), **setting.choice), RadixCollator()
        ),
        OTHER_ORDER: lambda: trainer(setting.model(), reversed_rows(default_data_collator)),
        f"padding-free {setting.kernel}": lambda: trainer(
            setting.packed(), DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        ),
    }


def sft_arms(setting: Setting) -> Arms:
    """SFTTrainer on padded batches, with padding_free, with packing, and with the two lines of radixtrain."""
    trl, rows = optional("trl"), optional("datasets").Dataset.from_list(setting.features())

    def trainer(model: Any, collate: Any = None, reverse: bool = False, **flags: Any) -> Trainer:
        flags = {"max_length": None, "train_sampling_strategy": "sequential", **flags}
        config = trl.SFTConfig(**{**setting.arguments, **flags})
        options = {"train_dataset": rows, "data_collator": collate, "processing_class": setting.tokenizer()}
        made = trl.SFTTrainer(model, config, **options)
        made.data_collator = reversed_rows(made.data_collator) if reverse else made.data_collator
        return made

    whole = {"packing": True, "max_length": setting.tokens, "per_device_train_batch_size": 1}  # a batch in one row
    return {
        "padded": lambda: trainer(setting.model()),
        setting.named("radixtrain"): lambda: trainer(
            share_prefixes(setting.model(), **setting.choice), RadixCollator()
        ),
        OTHER_ORDER: lambda: trainer(setting.model(), reverse=True),
        f"padding_free {setting.kernel}": lambda: trainer(setting.packed(), padding_free=True),
        f"packing {setting.kernel}": lambda: trainer(setting.packed(), **whole),
    }


def dpo_arms(setting: Setting) -> Arms:
    """DPOTrainer, and with `share_prefixes` around policy and reference. A batch has half as many pairs as rows."""
    trl, datasets = optional("trl"), optional("datasets")
    prompt, owns = setting.texts()
    pairs = [
        {"prompt": prompt, "chosen": f" {a}", "rejected": f" {b}"} for a, b in zip(owns[::2], owns[1::2], strict=True)
    ]
    rows = datasets.Dataset.from_list(pairs)
    flags = {"per_device_train_batch_size": setting.rows // 2, "max_length": None}
    config = trl.DPOConfig(**{**setting.arguments, **flags, "train_sampling_strategy": "sequential"})

    def trainer(share: Callable[[Any], Any], reverse: bool = False) -> Trainer:
        models = [share(setting.model()) for _ in range(2)]
        made = trl.DPOTrainer(*models, config, train_dataset=rows, processing_class=setting.tokenizer())
        made.data_collator = reversed_rows(made.data_collator) if reverse else made.data_collator
        return made

    return {
        "as it is": partial(trainer, lambda model: model),
        setting.named("share_prefixes"): partial(trainer, partial(share_prefixes, **setting.choice)),
        OTHER_ORDER: partial(trainer, lambda model: model, reverse=True),
    }
