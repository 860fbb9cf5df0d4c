"""Hugging Face's `Trainer` on models that classify whole rows or single tokens, under `share_prefixes`.

A sequence-classification model finds the last token of a row by itself, from the ids: whatever fills the padding, it
must see the ids as they came. If pad is EOS, it reads the last token before EOS, shared or not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiers import FULL
from tiny_models import tiny_model
from torch import Tensor
from trainer_harness import compare, settings
from trainer_loop import EOS, IGNORED, PROMPT, padded

NUM_LABELS = 3
INSTRUCTION = PROMPT * 2

Row = dict[str, Any]


def rows_of_classes() -> list[Row]:
    """24 texts after one instruction, with a class each, and classes of their tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(24):
        text = torch.randint(10, 50, (2 + number % 6,), generator=generator).tolist()
        classes = [token % NUM_LABELS for token in text]
        of_tokens = [IGNORED] * len(INSTRUCTION) + classes + [0]
        rows.append({"ids": [*INSTRUCTION, *text, EOS], "class": sum(classes) % NUM_LABELS, "classes": of_tokens})
    return rows


def of_sequences(rows: list[Row], side: str, pad: int) -> dict[str, Tensor]:
    return {**of_tokens(rows, side, pad), "labels": torch.tensor([row["class"] for row in rows])}


def of_tokens(rows: list[Row], side: str, pad: int) -> dict[str, Tensor]:
    return padded([row["ids"] for row in rows], [row["classes"] for row in rows], side, pad)


@FULL
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "collator", "pad"),
    [
        ("Qwen3ForSequenceClassification", of_sequences, 0),
        ("Qwen3ForSequenceClassification", of_sequences, EOS),
        ("LlamaForSequenceClassification", of_sequences, EOS),
        ("Qwen3ForTokenClassification", of_tokens, 0),
    ],
)
def test_trainer(tmp_path, table, name, collator, pad, side):
    """Two micro-batches a step, and an evaluation after the last one."""
    from transformers import Trainer, TrainingArguments

    def build(share: Callable[[Any], Any]) -> Trainer:
        model = share(tiny_model(name, num_labels=NUM_LABELS, pad_token_id=pad, eos_token_id=EOS))
        arguments, data = TrainingArguments(**settings(tmp_path, remove_unused_columns=False)), rows_of_classes()
        collate = partial(collator, side=side, pad=pad)
        return Trainer(model, arguments, collate, train_dataset=data, eval_dataset=data[:6])

    found = compare(build, evaluate=True)
    assert found.r > 2
    table(f"Trainer, {name}, {side}{', pad == eos' * (pad == EOS)}", found)
