"""The drop-in: other people's trainers, the same rows, padded baseline against radix. Loss and grad_norm per step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from radixtrain import RadixCollator, prepare_model

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Twelve sequences behind one prompt; two of them, and so the branch labels, begin alike."""
    rng = np.random.default_rng(0)
    tails = [rng.integers(10, 50, rng.integers(3, 9)).tolist() for _ in range(11)]
    tails.append([*tails[0][:2], 49])
    return [{"input_ids": SHARED + tail, "labels": [-100] * len(SHARED) + tail} for tail in tails]


def history(trainer) -> list[tuple[float, float]]:
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def assert_same(radix: list[tuple[float, float]], padded: list[tuple[float, float]], steps: int) -> None:
    assert len(radix) == len(padded) == steps
    assert np.array(radix) == pytest.approx(np.array(padded), rel=2e-6)


@pytest.mark.parametrize(
    ("accumulation", "checkpointing", "workers"), [(1, False, 0), (3, False, 0), (2, True, 0), (1, False, 2)]
)
def test_hugging_face_trainer(tiny_qwen3, rows, tmp_path, accumulation, checkpointing, workers):
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainingArguments

    def train(model, collator):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, report_to="none",
            gradient_accumulation_steps=accumulation, activation_checkpointing=checkpointing, logging_steps=1,
            dataloader_num_workers=workers, save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        return history(Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator))

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_word_tokenizer(), pad_token="0")
    padded = train(tiny_qwen3(), DataCollatorForSeq2Seq(tokenizer))
    radix = train(prepare_model(tiny_qwen3()), RadixCollator())
    assert_same(radix, padded, steps=3)


def test_trl_sft_trainer(tiny_qwen3, rows, tmp_path):
    trl = pytest.importorskip("trl", reason="pip install 'radixtrain[dev]'")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_word_tokenizer(), pad_token="0", eos_token="1")

    def train(model, collator):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=3, gradient_accumulation_steps=2,
            learning_rate=1e-3, report_to="none", logging_steps=1, save_strategy="no", use_cpu=True, bf16=False,
            disable_tqdm=True, max_length=None, seed=0,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            data_collator=collator,
        )  # fmt: skip
        return history(trainer)

    padded = train(tiny_qwen3(), None)
    radix = train(prepare_model(tiny_qwen3()), RadixCollator())
    assert_same(radix, padded, steps=3)


def test_plain_loop(tiny_qwen3, rows):
    model = prepare_model(tiny_qwen3())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        for batch in DataLoader(rows, batch_size=6, collate_fn=RadixCollator(), num_workers=2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(n): n for n in range(50)}, unk_token="2"))
