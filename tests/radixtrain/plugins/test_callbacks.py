"""The callbacks of Hugging Face's Trainer and of Lightning: what they share trains the same."""

from typing import Any

import lightning as L
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from radixtrain import sharing_report
from radixtrain.plugins import lightning_callback, trainer_callback
from radixtrain.verification.oracle import float64_throughout

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
