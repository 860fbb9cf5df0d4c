"""The drop-in: other people's trainers, each with its own padded batches and with ours. Every step is the same.

The baseline has the trainer's stock collator and a model that was never prepared; the other run has `RadixCollator` and
`share_prefixes`, and nothing else differs. How a trainer averages over accumulated micro-batches is its own affair, and
the same in both. Loss, gradient norm and gradient of each step are compared, unrounded.

All runs compute in float64. What trainers do with a batch besides, cut it or spread it over devices, is refused with
the fix.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.utils.data import DataLoader

from radixtrain import RadixCollator, share_prefixes
from radixtrain.errors import UserError
from tests.claims.loops import AccelerateLoop, LightningLoop, Loop
from tests.support import FULL, cases, trainers
from tests.support.trainers import Stream

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that Transformers will drop

STEPS = 6
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

Row = dict[str, list[int]]
Collator = Callable[[list[Row]], dict[str, Any]]


# The data: five micro-batches of four rows, so that accumulation over 3 meets the end of an epoch.


def family(longest: int, rng: np.random.Generator) -> list[Row]:
    """One micro-batch: an answer twice, one that branches off it, and a text that bears loss on every token."""
    answer, other, text = (rng.integers(10, 50, length).tolist() for length in (longest, 4, 5))
    tails = [answer, answer, [*answer[:2], *other]]
    rows = [{"input_ids": PROMPT + tail, "labels": [-100] * len(PROMPT) + tail} for tail in tails]
    return [*rows, {"input_ids": PROMPT[:7] + text, "labels": PROMPT[:7] + text}]


@pytest.fixture
def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    return [row for longest in (9, 3, 17, 5, 12) for row in family(longest, rng)]


def number_tokenizer() -> Any:
    return trainers.word_tokenizer(map(str, range(50)), "0", "1", "2")


def stock_collator() -> Collator:
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(number_tokenizer())


# The trainers, each of which trains for STEPS optimizer steps. collator: None for the stock one.


def settings(folder: Path, accumulation: int, **others: Any) -> dict[str, Any]:
    """Of a Hugging Face trainer."""
    own = {"gradient_accumulation_steps": accumulation, "train_sampling_strategy": "sequential", "max_steps": STEPS}
    return trainers.settings(folder, **{**own, **others})


def hugging_face(
    model: nn.Module,
    collator: Collator | None,
    rows: Any,
    folder: Path,
    accumulation: int = 1,
    accepts_count: bool | None = None,
    **others: Any,
) -> Any:
    """accepts_count: whether the trainer gives the model `num_items_in_batch`, if it should not find out itself."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**settings(folder, accumulation, **others))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator or stock_collator())
    if accepts_count is not None:
        trainer.model_accepts_loss_kwargs = accepts_count
    return trainer


def trl(
    model: nn.Module,
    collator: Collator | None,
    rows: list[Row],
    folder: Path,
    accumulation: int = 1,
    lora: bool = False,
) -> Any:
    """With gradient checkpointing, head and loss fused, as TRL has it, and its own collator for the baseline."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings(folder, accumulation, max_length=None, gradient_checkpointing=True)),
        train_dataset=Dataset.from_list(rows),
        data_collator=collator,
        processing_class=number_tokenizer(),
        peft_config=lora_config() if lora else None,
    )


def lora_config() -> Any:
    """Without dropout; B begins random, for with B = 0 the gradient of A is zero and nothing is tested."""
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )


def loop(
    kind: type[Loop], model: nn.Module, collator: Collator | None, rows: Any, folder: Path, **options: Any
) -> Loop:
    loader: Any = DataLoader(rows, batch_size=4, collate_fn=collator or stock_collator())
    return kind(model, loader, STEPS, **options)


accelerate = partial(loop, AccelerateLoop)
TRAINERS: dict[str, Callable[..., Any]] = {
    "Trainer": hugging_face,
    "SFTTrainer": trl,
    "Accelerate": accelerate,
    "loop": partial(loop, Loop),
    "Lightning": partial(loop, LightningLoop),
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


@pytest.fixture
def assert_drop_in(tiny_qwen3, tmp_path) -> Callable[..., None]:
    """`assert_drop_in(make, rows, other)`: a run with our collator takes the steps of the padded one.

    other: makes the trainer of the second run, instead of `make`.
    """

    def check(make: Any, rows: Any, other: Any = None) -> None:
        padded = trainers.run(lambda share: make(share(tiny_qwen3()), None, rows, tmp_path), lambda model: model)
        ours = other or make
        radix = trainers.run(lambda share: ours(share(tiny_qwen3()), RadixCollator(), rows, tmp_path), share_prefixes)
        others = {name for entry in padded.entries for name in entry} - {"loss", "grad_norm"}  # counts of padded rows
        worst = trainers.differences_of(padded, radix, skipped=others)
        assert worst.keys() == {"loss", "grad_norm", "gradient"} and len(radix.gradients) == STEPS

    return check


@pytest.mark.parametrize("case", cases(CASES, ["Trainer", "loop, accumulation"]))
def test_same_steps(assert_drop_in, rows, case):
    assert_drop_in(CASES[case], rows)


@FULL
@pytest.mark.parametrize("make", STREAMED, ids=["Trainer", "Accelerate"])
def test_rows_without_a_length(assert_drop_in, rows, make):
    assert_drop_in(make, Stream(rows))


# A mistake, which the comparison must see. Those of a collator are in `equivalence/test_mutations.py`.


@FULL
def test_wrong_normalisation_is_seen(assert_drop_in, rows):
    """Hugging Face's Trainer if it does not know that the model takes `num_items_in_batch`: a mean of means."""
    wrong = partial(hugging_face, accumulation=3, accepts_count=False)
    with pytest.raises(AssertionError, match="loss, entry 0"):
        assert_drop_in(partial(hugging_face, accumulation=3), rows, other=wrong)


# What is refused.


DISPATCHED = {"dispatch_batches": True}
OF_TRAINER = r'accelerator_config=\{"dispatch_batches": False\}'
CUT = [
    *((hugging_face, Stream, {"accelerator_config": config}, OF_TRAINER) for config in ({}, SPLIT)),
    *((hugging_face, list, {"accelerator_config": DISPATCHED | config}, OF_TRAINER) for config in ({}, SPLIT)),
    *((accelerate, data, config, r"DataLoaderConfiguration\(dispatch_batches=False\)")
      for data, config in ((Stream, {}), (list, DISPATCHED))),
]  # fmt: skip


@pytest.mark.parametrize(("make", "data", "options", "fix"), cases(CUT, CUT[:1]))
def test_a_batch_that_a_trainer_cuts_is_refused_with_the_fix(tiny_qwen3, rows, tmp_path, make, data, options, fix):
    with pytest.raises(UserError, match=fix):
        make(share_prefixes(tiny_qwen3()), RadixCollator(), data(rows), tmp_path, **options).train()


def test_data_parallel_is_refused(tiny_qwen3, rows):
    """It copies the model by this method, and the copy keeps the hooks."""
    model = share_prefixes(tiny_qwen3())
    assert model.model._replicate_for_data_parallel()._is_replica
    model.model._is_replica = True
    with pytest.raises(UserError, match=r"one process per GPU \(torchrun\)"):
        model(**RadixCollator()(rows))
