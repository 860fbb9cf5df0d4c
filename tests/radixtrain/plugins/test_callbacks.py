"""The callbacks of Hugging Face's Trainer and of Lightning: what they share trains the same."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from radixtrain import RadixCollator, log_sharing, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.plugins import lightning_callback, trainer_callback
from radixtrain.verification.oracle import float64_throughout
from tests.support.models import tiny_model

IDS = torch.tensor([[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4, 5], [7, 8, 9, 5, 4, 6], [7, 8, 9, 5, 6, 6]])
ROWS = [{"input_ids": row, "labels": row} for row in IDS]
LINE = "radixtrain: model: r = 1.85, 2 of 2 calls shared\n"  # 24 tokens, 13 unique


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("added", ["at its start", "later"])
def test_hugging_face(tmp_path, capfd, added):
    def trained(*callbacks: Any) -> nn.Module:
        model = tiny_model("Qwen3ForCausalLM")
        arguments = TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True, save_strategy="no"
        )
        with float64_throughout(model):
            trainer = Trainer(
                model, arguments, train_dataset=ROWS, callbacks=[] if added == "later" else list(callbacks)
            )
            for callback in callbacks if added == "later" else ():
                trainer.add_callback(callback)
            trainer.train()
            return model

    shared = trained(trainer_callback.SharePrefixesCallback())
    assert LINE in capfd.readouterr().err
    torch.testing.assert_close(weights(shared), weights(trained()), rtol=1e-9, atol=1e-12)
    assert sharing_report(shared).num_shared == 2


class Tracker(TrainerCallback):
    """Stands for one that `report_to` names, which a trainer puts before the callbacks that it is given."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs))


# Of three steps of two micro-batches of two rows, evaluated on all four after each step, logged after the second: T/U.
PAIRS = {"sorted": (ROWS, 24 / 16), "crossed": ([ROWS[0], ROWS[2], ROWS[1], ROWS[3]], 24 / 18)}
DOORS = {"collator": (share_prefixes, RadixCollator()), "share_prefixes": (share_prefixes, None)}


@pytest.mark.parametrize("order", PAIRS)
@pytest.mark.parametrize("door", DOORS)
def test_r_is_beside_the_loss(tmp_path, capfd, door, order):
    """In every tracker and in the state, of the training steps only; the last line counts evaluations too."""
    (share, collator), (rows, r), tracker = DOORS[door], PAIRS[order], Tracker()
    options = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2, "max_steps": 4, "report_to": "none"}
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, save_strategy="no",
        train_sampling_strategy="sequential", **options
    )  # fmt: skip
    trainer = Trainer(
        share(tiny_model("Qwen3ForCausalLM"), **({} if collator else {"min_ratio": 0.0})),
        arguments,
        train_dataset=rows,
        eval_dataset=ROWS,
        data_collator=collator,
        callbacks=[tracker],
    )
    for _ in range(2):  # it is there once
        log_sharing(trainer)
    trainer.train()
    for entries in (tracker.logged, trainer.state.log_history):
        assert [entry["r"] for entry in entries if "loss" in entry] == [r, r]
        assert not any("r" in entry for entry in entries if "loss" not in entry)
    report, said = sharing_report(trainer), capfd.readouterr().err
    assert (report.num_tokens, report.num_unique_tokens) == (8 * 24, 4 * round(24 / r) + 4 * 13)
    assert said.count("radixtrain: model: r = ") == 1 and f"r = {report.compression_ratio:.2f}, 12 of 12" in said


def test_r_of_a_model_that_shares_nothing(tmp_path):
    trainer = Trainer(tiny_model("Qwen3ForCausalLM"), TrainingArguments(tmp_path, report_to="none", use_cpu=True))
    with pytest.raises(UserError, match=r"shares nothing: call share_prefixes\(model\) first"):
        log_sharing(trainer)


class Module(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_lightning(tmp_path, capfd):
    def trained(*callbacks: Any) -> nn.Module:
        model = tiny_model("Qwen3ForCausalLM")
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=list(callbacks), **options)
        with float64_throughout(model):
            trainer.fit(Module(model.train()), torch.utils.data.DataLoader(ROWS, batch_size=4))
        return model

    shared = trained(lightning_callback.SharePrefixesCallback(min_ratio=1.5))
    assert LINE in capfd.readouterr().err
    torch.testing.assert_close(weights(shared), weights(trained()), rtol=1e-9, atol=1e-12)
