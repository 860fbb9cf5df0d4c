"""What a run leaves behind besides its weights: the closing lines of `fit`, and the records of `predict`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from rich.console import Console

if TYPE_CHECKING:
    from radixtrain.training.module import RadixModule

__all__ = ["PredictionWriter", "RunSummary"]


class RunSummary(L.Callback):
    """Remembers where the loss began and prints where everything is."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.first_loss: float | None = None

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self.first_loss is None:
            self.first_loss = float(trainer.callback_metrics["loss"])

    def print_closing_lines(self, trainer: L.Trainer, module: RadixModule, model_folder: Path) -> None:
        """Loss, r, tokens per second, and the folders. Nothing where no step was taken."""
        speed, metrics = module.speed, trainer.callback_metrics
        if self.first_loss is None or not speed.seconds:
            return
        effective, computed = speed.num_tokens / speed.seconds, speed.num_computed_tokens / speed.seconds
        lines = {
            "loss": f"{self.first_loss:.4f} -> {float(metrics['loss']):.4f} in {trainer.global_step} steps",
            "eval_loss": f"{float(metrics['eval_loss']):.4f}" if "eval_loss" in metrics else "",
            "r": f"{speed.num_tokens / speed.num_computed_tokens:.2f} tokens per computed token",
            "tokens/s": f"{effective:,.0f} effective, {computed:,.0f} computed, {speed.seconds:.0f} s of training",
            "model": f"{model_folder}",
            "checkpoints": f"{self.output_dir / 'checkpoints'}",
            "logs": f"{trainer.log_dir or self.output_dir}",
        }
        for name, text in lines.items():
            if text:
                _say(f"{name:<12} {text}")


class PredictionWriter(L.Callback):
    """Writes `predictions.jsonl`: one line a sequence, with the log-probability of each labelled token.

    {"row": "test.jsonl:1", "tokens": [3, 17], "logprobs": [-0.12, -0.03]}

    The file appears when it is complete.
    """

    def __init__(self, output_dir: Path):
        self.path = output_dir / "predictions.jsonl"
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self.num_sequences = 0

    def on_predict_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_text("", encoding="utf-8")

    def on_predict_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        with self.partial.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in outputs)
        self.num_sequences += len(outputs)

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        os.replace(self.partial, self.path)
        _say(f"predictions  {self.path} ({self.num_sequences} sequences)")


def _say(line: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(line)
