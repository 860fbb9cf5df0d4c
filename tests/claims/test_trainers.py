"""What trainers do with a batch: cut it, which is refused with the fix, or run in float16.

What is not refused is compared with the same run on ordinary padded batches: loss and grad_norm of every step.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer
from transformers import TrainingArguments as Arguments

from radixtrain import RadixCollator, prepare_model
from radixtrain.errors import UserError
from radixtrain.hf.trainers import check_not_cut
from radixtrain.tree.layout import TreeLayout
from radixtrain.verification.equivalence import verify_arms
from radixtrain.verification.oracle import ordinary_padded, radix_batch

BAR = 1e-6
STEPS = 4
ROWS_PER_BATCH = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
NO_DISPATCH = {"dispatch_batches": False}

Row = dict[str, list[int]]
Collator = Callable[[list[Row]], dict[str, Any]]
History = npt.NDArray[np.float64]  # (steps, 2): loss, grad_norm


def make_rows(seed: int = 0) -> list[Row]:
    """22 answers to one prompt, of 2 to 12 tokens: batches differ in their number of labels, and so do processes."""
    rng = np.random.default_rng(seed)
    answers = [rng.integers(10, 50, length).tolist() for length in rng.integers(2, 13, 22)]
    return [{"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer} for answer in answers]


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def stock_collator() -> Collator:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(n): n for n in range(50)}, unk_token="2"))
    return DataCollatorForSeq2Seq(PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"))


def trainer_of(model: nn.Module, collator: Collator, rows: Any, folder: Path, **others: Any) -> Trainer:
    arguments = Arguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS_PER_BATCH,
        learning_rate=1e-4,
        per_device_eval_batch_size=ROWS_PER_BATCH,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **others,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)


def train(trainer: Trainer) -> History:
    trainer.train()
    return np.array([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])


def accelerate_loop(model: nn.Module, loader: DataLoader, **configuration: Any) -> History:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    history = []
    for batch in islice(loader, STEPS):
        loss = model(**batch).loss
        accelerator.backward(loss)
        history.append((loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    return np.array(history)


def assert_equal(radix: History, padded: History) -> None:
    assert radix.shape == padded.shape == (STEPS, 2)
    np.testing.assert_allclose(radix, padded, rtol=BAR)


def streamed(rows: list[Row]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows).to_iterable_dataset()


class TestTrainer:
    @pytest.mark.parametrize(
        ("data", "config"),
        [
            (Stream, {}),
            (streamed, {}),
            (Stream, {"split_batches": True}),
            (list, {"dispatch_batches": True}),
            (list, {"dispatch_batches": True, "split_batches": True}),
        ],
    )
    def test_a_cut_batch_is_refused_with_the_fix(self, tiny_qwen3, tmp_path, data, config):
        trainer = trainer_of(
            prepare_model(tiny_qwen3()), RadixCollator(), data(make_rows()), tmp_path, accelerator_config=config
        )
        with pytest.raises(UserError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
            trainer.train()

    @pytest.mark.parametrize(
        ("data", "config"),
        [(Stream, NO_DISPATCH), (streamed, NO_DISPATCH), (list, {"split_batches": True})],
    )
    def test_a_whole_batch_trains_as_the_padded_one(self, tiny_qwen3, tmp_path, data, config):
        runs = [
            train(trainer_of(model, collator, data(make_rows()), tmp_path, accelerator_config=config))
            for model, collator in ((prepare_model(tiny_qwen3()), RadixCollator()), (tiny_qwen3(), stock_collator()))
        ]
        assert_equal(*runs)


class TestAccelerate:
    @pytest.mark.parametrize(("data", "configuration"), [(Stream, {}), (list, {"dispatch_batches": True})])
    def test_a_cut_batch_is_refused_with_the_fix(self, tiny_qwen3, data, configuration):
        loader = DataLoader(data(make_rows()), ROWS_PER_BATCH, collate_fn=RadixCollator())
        with pytest.raises(UserError, match=r"DataLoaderConfiguration\(dispatch_batches=False\)"):
            accelerate_loop(prepare_model(tiny_qwen3()), loader, **configuration)

    @pytest.mark.parametrize(
        ("data", "configuration"), [(list, {}), (list, {"split_batches": True}), (Stream, NO_DISPATCH)]
    )
    def test_a_whole_batch_trains_as_the_padded_one(self, tiny_qwen3, data, configuration):
        runs = [
            accelerate_loop(model, DataLoader(data(make_rows()), ROWS_PER_BATCH, collate_fn=collator), **configuration)
            for model, collator in ((prepare_model(tiny_qwen3()), RadixCollator()), (tiny_qwen3(), stock_collator()))
        ]
        assert_equal(*runs)


def cut(layout: TreeLayout, part: slice) -> TreeLayout:
    return replace(layout, **{name: value[part] for name, value in vars(layout).items() if isinstance(value, Tensor)})


class TestCheckNotCut:
    @pytest.mark.parametrize("rows", [make_rows(), make_rows()[:1], [{"input_ids": [5, 6], "labels": [5, 6]}]])
    def test_a_whole_layout_passes_and_every_cut_is_seen(self, rows):
        """Cut by Accelerate: one process keeps the first element, of several each keeps one, or none."""
        layout = TreeLayout.from_batch(RadixCollator()(rows))
        check_not_cut(nn.Identity(), layout)
        for part in (slice(0, 1), slice(1, 2), slice(0, 0)):
            with pytest.raises(UserError, match="this radix batch was cut"):
                check_not_cut(nn.Identity(), cut(layout, part))

    def test_data_parallel(self):
        """It copies the model by this method, and the copy keeps the hooks."""
        layout = TreeLayout.from_batch(RadixCollator()(make_rows()))
        with pytest.raises(UserError, match=r"one process per GPU \(torchrun\)"):
            check_not_cut(nn.Identity()._replicate_for_data_parallel(), layout)


@pytest.mark.parametrize("autocast", [False, True])
def test_float16(tiny_qwen3, autocast):
    """In float16 weights, and under autocast as `fp16=True` does: as near the float64 truth as the padded batch."""
    radix, ordinary, worst = [], [], []
    for seed in range(5):
        model, rows = tiny_qwen3(seed), make_rows(seed)
        batch = RadixCollator()(rows)
        (rung,) = verify_arms(
            model if autocast else model.half(),
            rows,
            partial(ordinary_padded, model, rows),
            partial(radix_batch, model, batch),
            precisions=["float16"],
            autocast=torch.float16 if autocast else None,
        ).rungs
        errors = [(tensor.radix, tensor.ordinary) for tensor in rung.alive]
        assert len(errors) == len(list(model.parameters())) and not rung.failed
        worst.append(np.divide(*np.max(errors, axis=0)))
        for arm, values in zip((radix, ordinary), zip(*errors, strict=True), strict=True):
            arm.extend(values)
    assert 1e-4 < np.median(ordinary) < 1e-2, "it was float16"
    assert np.median(radix) <= 1.2 * np.median(ordinary) and np.median(worst) <= 2.0
