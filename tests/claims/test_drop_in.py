"""The drop-in: other people's trainers, each with its own padded batches and with ours. Loss and grad_norm per step.

The baseline has the trainer's stock collator and a model that was never prepared; the other run has `RadixCollator` and
`share_prefixes`, and nothing else differs. How a trainer averages over accumulated micro-batches is its own affair, and
the same in both. Numbers are compared unrounded: a Trainer prints four digits, its `log_history` keeps them all.

All runs compute in float64. What trainers do with a batch besides, cut it or spread it over devices, is refused with
the fix.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from radixtrain import RadixCollator, share_prefixes
from radixtrain.collators.misuse_guard import end_watch
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL, cases, trainers
from tests.support.trainers import Stream

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that Transformers will drop

BAR = trainers.BAR
MISTAKE = 1e-3  # what a mistake changes is far more
LEARNING_RATE = 1e-4
STEPS = 6
ROWS_PER_BATCH = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

Batch = dict[str, Any]
Row = dict[str, list[int]]
Collator = Callable[[list[Row]], Batch]
History = npt.NDArray[np.float64]  # (steps, 2): loss, grad_norm


# The data: five micro-batches of four rows, so that accumulation over 3 meets the end of an epoch.


def family(longest: int, rng: np.random.Generator) -> list[Row]:
    """One micro-batch: an answer twice, one that branches off it, and a text that bears loss on every token."""
    answer, other, text = (rng.integers(10, 50, length).tolist() for length in (longest, 4, 5))
    tails = [answer, answer, [*answer[:2], *other]]
    rows = [{"input_ids": PROMPT + tail, "labels": [-100] * len(PROMPT) + tail} for tail in tails]
    return [*rows, {"input_ids": PROMPT[:7] + text, "labels": PROMPT[:7] + text}]


def make_rows() -> list[Row]:
    rng = np.random.default_rng(0)
    return [row for longest in (9, 3, 17, 5, 12) for row in family(longest, rng)]


@pytest.fixture
def rows() -> list[Row]:
    return make_rows()


def micro_batches(rows: Any, collator: Collator) -> DataLoader:
    return DataLoader(rows, batch_size=ROWS_PER_BATCH, collate_fn=collator)  # type: ignore[arg-type]


def stock_collator() -> Collator:
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(number_tokenizer())


def number_tokenizer() -> Any:
    return trainers.word_tokenizer(map(str, range(50)), "0", "1", "2")


# The trainers. Each trains for STEPS optimizer steps and returns what it saw of them.


def settings(folder: Path, accumulation: int, **others: Any) -> dict[str, Any]:
    """Of a Hugging Face trainer."""
    own = {"gradient_accumulation_steps": accumulation, "train_sampling_strategy": "sequential", "max_steps": STEPS}
    return trainers.settings(folder, **{**own, **others})


def logged(trainer: Any) -> History:
    trainer.train()
    return np.array([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])


def hugging_face(
    model: nn.Module,
    collator: Collator,
    rows: Any,
    folder: Path,
    accumulation: int = 1,
    accepts_count: bool | None = None,
    **others: Any,
) -> History:
    """accepts_count: whether the trainer gives the model `num_items_in_batch`, if it should not find out itself."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**settings(folder, accumulation, **others))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    if accepts_count is not None:
        trainer.model_accepts_loss_kwargs = accepts_count
    return logged(trainer)


def trl(
    model: nn.Module, collator: Collator, rows: list[Row], folder: Path, accumulation: int = 1, lora: bool = False
) -> History:
    """With gradient checkpointing, head and loss fused, as TRL has it, and its own collator for the baseline."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)  # of the adapters
    arguments = SFTConfig(**settings(folder, accumulation, max_length=None, gradient_checkpointing=True))
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        data_collator=None if isinstance(collator, DataCollatorForSeq2Seq) else collator,
        processing_class=number_tokenizer(),
        peft_config=lora_config() if lora else None,
    )
    return logged(trainer)


class Record(list[tuple[float, float]]):
    """Of a loop: the loss, summed over micro-batches, and the gradient norm of every optimizer step."""

    loss = 0.0

    def add(self, loss: Tensor) -> None:
        self.loss += loss.item()

    def close_step(self, grad_norm: Tensor) -> None:
        self.append((self.loss, grad_norm.item()))
        self.loss = 0.0


def accelerate(
    model: nn.Module, collator: Collator, rows: Any, folder: Path, accumulation: int = 1, **configuration: Any
) -> History:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    spread = DataLoaderConfiguration(**configuration)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=spread)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, micro_batches(rows, collator))
    record = Record()
    while len(record) < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)  # divides by the number of accumulated batches
                record.add(loss / accumulation)
                if accelerator.sync_gradients:
                    record.close_step(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
    return np.array(record[:STEPS])


def plain_loop(model: nn.Module, collator: Collator, rows: list[Row], folder: Path, accumulation: int = 1) -> History:
    """The loss of a step is the mean over its labelled tokens, whatever micro-batch they are in."""
    batches = list(micro_batches(rows, collator)) * STEPS
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LEARNING_RATE)
    record = Record()
    for number in range(STEPS):
        step = batches[number * accumulation :][:accumulation]
        for batch in step:
            loss = model(**batch, num_items_in_batch=sum(map(num_labels, step))).loss
            loss.backward()
            record.add(loss)
        record.close_step(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return np.array(record)


def num_labels(batch: Batch) -> int:
    return int((batch.get("shift_labels", batch["labels"][:, 1:]) != -100).sum())


QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def lightning(model: nn.Module, collator: Collator, rows: list[Row], folder: Path, accumulation: int = 1) -> History:
    """A user's module under automatic optimization; it reads what goes backward, and the gradient."""
    import lightning as L

    record = Record()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

        def backward(self, loss: Tensor) -> None:
            record.add(loss)  # already divided by accumulate_grad_batches
            super().backward(loss)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            record.close_step(nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()]))

    trainer = L.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=1.0,
        accelerator="cpu",
        default_root_dir=folder,
        **dict.fromkeys(QUIET, False),
    )
    trainer.fit(Module(), micro_batches(rows, collator))
    return np.array(record)


def lora_config() -> Any:
    """Without dropout; B begins random, for with B = 0 the gradient of A is zero and nothing is tested."""
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )


TRAINERS = {
    "Trainer": hugging_face,
    "SFTTrainer": trl,
    "Accelerate": accelerate,
    "loop": plain_loop,
    "Lightning": lightning,
}
WHOLE = {"dispatch_batches": False}
SPLIT = {"split_batches": True}
CASES = {
    **TRAINERS,
    **{f"{name}, accumulation": partial(train, accumulation=3) for name, train in TRAINERS.items()},
    "Trainer, checkpointing": partial(hugging_face, accumulation=3, gradient_checkpointing=True),
    "Trainer, workers": partial(hugging_face, dataloader_num_workers=2),
    "Trainer, split": partial(hugging_face, accelerator_config=SPLIT),
    "Accelerate, split": partial(accelerate, **SPLIT),
    "SFTTrainer, LoRA": partial(trl, lora=True),
    "SFTTrainer, LoRA, accumulation": partial(trl, accumulation=3, lora=True),
}
STREAMED = [partial(hugging_face, accelerator_config=WHOLE), partial(accelerate, **WHOLE)]


# The comparison.


@pytest.fixture
def drop_in(tiny_qwen3, tmp_path) -> Callable[..., float]:
    """`drop_in(train, rows, other)`: how far a run with our collator is from the padded one: relative, the worst over
    the losses and gradient norms of all steps.

    other: trains in the second run, instead of `train`.
    """

    def run(train: Any, rows: Any, other: Any = None) -> float:
        with float64_arithmetic():
            padded = train(tiny_qwen3().double(), stock_collator(), rows, tmp_path)
            radix = (other or train)(share_prefixes(tiny_qwen3().double()), RadixCollator(), rows, tmp_path)
        assert radix.shape == padded.shape == (STEPS, 2)
        return float(np.abs(radix / padded - 1).max())

    return run


@pytest.mark.parametrize("case", cases(CASES, ["Trainer", "loop, accumulation"]))
def test_same_loss_and_grad_norm(drop_in, rows, case):
    assert drop_in(CASES[case], rows) <= BAR


@FULL
@pytest.mark.parametrize("train", STREAMED, ids=["Trainer", "Accelerate"])
def test_rows_without_a_length(drop_in, rows, train):
    assert drop_in(train, Stream(rows)) <= BAR


# A mistake, which the comparison must see. Those of a collator are in `equivalence/test_mutations.py`.


@FULL
def test_wrong_normalisation_is_seen(drop_in, rows):
    """Hugging Face's Trainer if it does not know that the model takes `num_items_in_batch`: a mean of means."""
    wrong = partial(hugging_face, accumulation=3, accepts_count=False)
    assert drop_in(partial(hugging_face, accumulation=3), rows, other=wrong) > MISTAKE


# What is refused.


@FULL
@pytest.mark.parametrize("trainer", ["Trainer", "Lightning"])
def test_model_that_is_not_prepared_is_refused(tiny_qwen3, rows, tmp_path, trainer):
    """In a process that has prepared no model."""
    end_watch()
    with pytest.raises(UserError, match="Qwen3ForCausalLM got a batch of RadixCollator, but it is not shared: call"):
        TRAINERS[trainer](tiny_qwen3(), RadixCollator(), rows, tmp_path)


@pytest.mark.parametrize(
    ("data", "config"),
    cases(
        [
            (Stream, {}),
            (Stream, {"split_batches": True}),
            (list, {"dispatch_batches": True}),
            (list, {"dispatch_batches": True, "split_batches": True}),
        ],
        [(Stream, {})],
    ),
)
def test_a_batch_that_a_trainer_cuts_is_refused_with_the_fix(tiny_qwen3, rows, tmp_path, data, config):
    with pytest.raises(UserError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
        hugging_face(
            share_prefixes(tiny_qwen3()), RadixCollator(), data(rows), tmp_path, max_steps=4, accelerator_config=config
        )


@FULL
@pytest.mark.parametrize(("data", "configuration"), [(Stream, {}), (list, {"dispatch_batches": True})])
def test_a_batch_that_accelerate_cuts_is_refused_with_the_fix(tiny_qwen3, rows, tmp_path, data, configuration):
    with pytest.raises(UserError, match=r"DataLoaderConfiguration\(dispatch_batches=False\)"):
        accelerate(share_prefixes(tiny_qwen3()), RadixCollator(), data(rows), tmp_path, **configuration)


def test_data_parallel_is_refused(tiny_qwen3, rows):
    """It copies the model by this method, and the copy keeps the hooks."""
    model = share_prefixes(tiny_qwen3())
    assert model.model._replicate_for_data_parallel()._is_replica
    model.model._is_replica = True
    with pytest.raises(UserError, match=r"one process per GPU \(torchrun\)"):
        model(**RadixCollator()(rows))
