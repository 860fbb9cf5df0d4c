"""Hugging Face's `Trainer` on models that classify whole rows or single tokens, under `share_prefixes`.

A sequence-classification model finds the last token of a row by itself, from the ids: whatever fills the padding, it
must see the ids as they came.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_harness import compare, settings
from trainer_loop import EOS, IGNORED, PROMPT, order_one, padded, padded_batches
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Trainer,
    TrainingArguments,
)

from radixtrain import share_prefixes

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
NUM_LABELS = 3
INSTRUCTION = PROMPT * 2

Row = dict[str, Any]


def classifier(model_class: Any, config_class: Any, pad: int) -> Any:
    config = config_class(**SIZES, **HEADS, num_labels=NUM_LABELS, pad_token_id=pad, eos_token_id=EOS)
    return order_one(model_class(config))


def rows_of_classes() -> list[Row]:
    """24 texts after one instruction, with a class each, and classes of their tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(24):
        text = torch.randint(10, 50, (2 + number % 6,), generator=generator).tolist()
        classes = [token % NUM_LABELS for token in text]
        ids = [*INSTRUCTION, *text, EOS]
        rows.append(
            {"ids": ids, "class": sum(classes) % NUM_LABELS, "classes": [IGNORED] * len(INSTRUCTION) + classes + [0]}
        )
    return rows


def of_sequences(rows: list[Row], side: str, pad: int) -> dict[str, Tensor]:
    batch = of_tokens(rows, side, pad)
    return {**batch, "labels": torch.tensor([row["class"] for row in rows])}


def of_tokens(rows: list[Row], side: str, pad: int) -> dict[str, Tensor]:
    return padded([row["ids"] for row in rows], [row["classes"] for row in rows], side, pad)


def trainer(model: Any, collator: Callable[[list[Row]], Any], folder: Path) -> Trainer:
    arguments = TrainingArguments(**settings(folder, remove_unused_columns=False))
    data = rows_of_classes()
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6], data_collator=collator)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("model_class", "config_class", "collator", "pad"),
    [
        (Qwen3ForSequenceClassification, Qwen3Config, of_sequences, 0),
        (Qwen3ForSequenceClassification, Qwen3Config, of_sequences, EOS),
        (LlamaForSequenceClassification, LlamaConfig, of_sequences, 0),
        (LlamaForSequenceClassification, LlamaConfig, of_sequences, EOS),
        (Qwen3ForTokenClassification, Qwen3Config, of_tokens, 0),
    ],
)
def test_trainer(tmp_path, table, model_class, config_class, collator, pad, side):
    """Two micro-batches a step, and an evaluation after the last one."""

    def build(share: Callable[[Any], Any]) -> Trainer:
        model = share(classifier(model_class, config_class, pad))
        return trainer(model, partial(collator, side=side, pad=pad), tmp_path)

    found = compare(build, evaluate=True)
    assert found.r > 2
    table(f"Trainer, {model_class.__name__}, {side}{', pad == eos' * (pad == EOS)}", found)


@pytest.mark.parametrize("side", ["right", "left"])
def test_scores_of_the_head_are_those_of_the_same_tokens(side):
    """If pad is EOS, Hugging Face reads the last token before EOS, shared or not."""
    model, (batch,) = (
        classifier(Qwen3ForSequenceClassification, Qwen3Config, EOS).eval(),
        padded_batches(side, EOS, steps=1),
    )
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        plain, shared = model(**inputs).logits, share_prefixes(model)(**inputs).logits
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(shared[3], shared[4]), "two rows that are equal"
