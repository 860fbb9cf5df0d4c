"""Evaluation in Hugging Face's Trainer and TRL's: the loss is that of ordinary batches, other metrics are refused.

What the refusal recommends, metrics of ordinary batches: tests/claims/trainers/test_trl.py.
Everything computes in float64.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from radixtrain import RadixCollator, share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.guards.batch import on_device_of_rows
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL
from tests.support.batches import tensors_of
from tests.support.models import tiny_qwen3
from tests.support.trainers import LOOP_PROMPT as PROMPT
from tests.support.trainers import settings, tokenizer

BAR = 1e-10
REFUSED = r"Trainer uses the logits of an evaluation .* of labelled tokens only.*recipes/hf_trainer_metrics\.py"


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_arithmetic():
        yield


def model() -> Any:
    return tiny_qwen3().double()


def rows() -> list[dict[str, list[int]]]:
    """11 answers to one prompt in three batches, the last one short, each with repeated answers."""
    answers = [[10 + n // 2, *range(20, 20 + n // 2)] for n in range(11)]
    return [{"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer} for answer in answers]


def trainer_of(
    library: str,
    model: nn.Module,
    collator: Any,
    folder: Path,
    kind: Any = None,
    arguments: Any = None,
    **others: Any,
) -> Any:
    """library: TRL or transformers. kind: another class than the library's own."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    is_trl = library == "TRL"
    own = {"max_steps": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-5, **(arguments or {})}
    config = (
        SFTConfig(**settings(folder, max_length=None, **own))
        if is_trl
        else TrainingArguments(**settings(folder, **own))
    )
    data = Dataset.from_list(rows()) if is_trl else rows()
    given = {"data_collator": collator, "processing_class": tokenizer(), **others}
    return (kind or (SFTTrainer if is_trl else Trainer))(model, config, train_dataset=data, eval_dataset=data, **given)


def radix() -> tuple[Any, Any]:
    return share_prefixes(model()), RadixCollator()


def ordinary() -> tuple[Any, Any]:
    from transformers import DataCollatorForSeq2Seq

    return model(), DataCollatorForSeq2Seq(tokenizer())


METRICS: dict[str, Any] = {"compute_metrics": lambda evaluated: {}}
TRAINERS = pytest.mark.parametrize("library", ["transformers", pytest.param("TRL", marks=FULL)])


@TRAINERS
@pytest.mark.parametrize("how", ["evaluate", "train", "predict"])
@pytest.mark.parametrize("is_second", [False, True])
def test_metrics_of_radix_batches_are_refused(tmp_path, library, how, is_second):
    """One row would be a batch: the tokens are counted correctly, the answers are not.

    Before anything is trained, also by a second trainer of one model.
    """
    arguments = {"eval_strategy": "steps", "eval_steps": 1} if how == "train" else {}
    shared = radix()
    if is_second:
        trainer_of(library, *shared, tmp_path).train()
    trainer = trainer_of(library, *shared, tmp_path, arguments=arguments, **({} if how == "predict" else METRICS))
    with pytest.raises(UserError, match=REFUSED):
        getattr(trainer, how)(*([trainer.eval_dataset] if how == "predict" else []))
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("collator", [radix()[1], lambda rows: radix()[1](rows)])
def test_a_training_without_such_an_evaluation_runs(tmp_path, collator):
    """None during training, or with the collator of another loader."""
    from transformers import Trainer

    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            self.data_collator, ordinary = collator, self.data_collator
            loader = super().get_train_dataloader()
            self.data_collator = ordinary
            return loader

    own = {"kind": OwnLoader, "arguments": {"eval_strategy": "epoch"}, **METRICS}
    for given, more in ((collator, METRICS), (ordinary()[1], own)):
        trainer = trainer_of("transformers", share_prefixes(model()), given, tmp_path, **more)
        trainer.train()
        assert trainer.state.global_step == 4


class TestLossOnly:
    @TRAINERS
    def test_is_that_of_ordinary_batches(self, tmp_path, library):
        """In training and after it; TRL's own metrics too, except its count of tokens, which are the unique ones."""
        logs = []
        for arm in (radix, ordinary):
            trainer = trainer_of(library, *arm(), tmp_path, arguments={"eval_strategy": "steps", "eval_steps": 2})
            trainer.train()
            trainer.evaluate()
            logs.append([entry for entry in trainer.state.log_history if "eval_loss" in entry])
        names = ["eval_loss", *(("eval_entropy", "eval_mean_token_accuracy") if library == "TRL" else ())]
        found, expected = ([[entry[name] for name in names] for entry in entries] for entries in logs)
        np.testing.assert_allclose(found, expected, rtol=BAR)
        assert len(found) == 3
        if library == "TRL":
            assert 0 < logs[0][-1]["eval_num_tokens"] < 0.6 * logs[1][-1]["eval_num_tokens"], "unique tokens"

    @TRAINERS
    def test_by_the_training_argument(self, tmp_path, library):
        trainer = trainer_of(library, *radix(), tmp_path, arguments={"prediction_loss_only": True}, **METRICS)
        expected = trainer_of(library, *ordinary(), tmp_path).evaluate()["eval_loss"]
        predicted = trainer.predict(trainer.eval_dataset)
        assert predicted.predictions is None
        assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=BAR)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=BAR)


@pytest.mark.parametrize(("asked", "refused"), [(True, False), (False, True), (None, True)])
def test_the_innermost_prediction_step_decides(tmp_path, asked, refused):
    """An override may ask its parent class for something else than it was asked for."""
    from transformers import Trainer

    class Own(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: Any = None):
            return super().prediction_step(model, inputs, asked, ignore_keys)

    trainer = trainer_of("transformers", *radix(), tmp_path, kind=Own)
    if refused:
        with pytest.raises(UserError, match=r"^Own uses the logits"):
            trainer.evaluate()
    else:
        assert trainer.evaluate()["eval_loss"] > 0


def test_what_a_wrapper_left_on_the_host_goes_where_the_rows_are():
    """DistributedDataParallel, FSDP and `Trainer` by itself move only tensors."""
    batch = RadixCollator()([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
    moved = on_device_of_rows(batch["radix"], {"inputs_embeds": batch["input_ids"].to("meta")})
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert on_device_of_rows(batch["radix"], batch) is batch["radix"]
