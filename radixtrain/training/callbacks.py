"""What a run does besides its steps: verify, show progress, save on SIGTERM, print closing lines, write predictions."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from radixtrain.collators.steps import StepCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError
from radixtrain.training.speed import Speed
from radixtrain.verification.oracle import Features
from radixtrain.verification.report import EquivalenceReport

__all__ = ["PredictionWriter", "ProgressLine", "RunSummary", "SaveOnSigterm", "VerifyFirstBatch"]

logger = logging.getLogger(__name__)

SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "learning_rate": ("lr", "{:.1e}"),
    "grad_norm": ("grad_norm", "{:.2f}"),
    "packing_ratio": ("packing_ratio", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "computed_tokens_per_second": ("computed/s", "{:,.0f}"),
    "eval_loss": ("eval_loss", "{:.4f}"),
}


class VerifyFirstBatch(L.Callback):
    """Compares the gradient of the first optimizer step with ordinary Hugging Face's, and stops if they differ.

    module: whose runs it compares; the trainer keeps the callback when it fits another one.
    verify: sequences of a step and what cuts them -> the comparison, as `RadixModule.verify`.
    """

    def __init__(self, module: L.LightningModule, verify: Callable[[Features, StepCollator], EquivalenceReport]):
        self.module = module
        self.verify = verify

    def on_train_start(self, trainer: Any, module: L.LightningModule) -> None:
        if module is not self.module:
            return
        data = trainer.datamodule
        if not isinstance(data, SFTData):
            raise UserError("model.verify_first_batch needs SFTData: it compares with sequences that are not collated")
        report = self.verify(data.features_of_step(0), data.step_collator())
        if not report.passed:
            raise UserError(f"model.verify_first_batch: {report.reason}. Nothing was trained")
        logger.info("first batch verified:\n%s", report)


class ProgressLine(TQDMProgressBar):
    """Lightning's bar with short names and readable numbers. Loggers receive the full names and all digits."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        return {short: form.format(metrics[name]) for name, (short, form) in SHOWN.items() if name in metrics}


class SaveOnSigterm(L.Callback):
    """Writes `interrupted.ckpt` after the step during which SIGTERM arrived; Lightning stops after it.

    It saves at the moment when `ModelCheckpoint` does, because the progress that Lightning stores is right then. After
    a signal at the end of an epoch, the checkpoint is what it would be after a signal in the last step. A signal during
    validation has no step to wait for, and the state is saved as it is.
    """

    def __init__(self, folder: Path):
        self.path = folder / "interrupted.ckpt"
        self.saved = False

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.received_sigterm:
            self._save(trainer)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and trainer.global_step and not self.saved:
            with _progress_at_last_step(trainer):
                self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self.saved = True


class RunSummary(L.Callback):
    """Remembers the first loss; prints the closing lines: losses, speed, and the folders that were written."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.first_loss: float | None = None

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self.first_loss is None:
            self.first_loss = float(trainer.callback_metrics["loss"])

    def print_closing_lines(self, trainer: L.Trainer, speed: Speed, model_folder: Path) -> None:
        """Loss, r, tokens per second, and the folders. Nothing if no step was taken."""
        metrics = trainer.callback_metrics
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
    """Writes `predictions.jsonl`: one line for each sequence, with its scores, in the order of the file.

    {"row": "test.jsonl:1", "tokens": [3, 17], "logprobs": [-0.12, -0.03]}

    The file appears when it is complete. Then it prints where it is, r, and sequences and tokens per second.
    """

    def __init__(self, output_dir: Path):
        self.path = output_dir / "predictions.jsonl"
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self.num_sequences = 0
        self.speed = Speed()

    def on_predict_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_text("", encoding="utf-8")
        self.speed.start()

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        with self.partial.open("a", encoding="utf-8") as file:
            file.writelines(f"{_as_json(record)}\n" for record in outputs)
        self.num_sequences += len(outputs)
        self.speed.add(batch.num_tokens, batch.num_computed_tokens)

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        os.replace(self.partial, self.path)
        _say(f"predictions  {self.path} ({self.num_sequences} sequences)")
        speed = self.speed
        if speed.seconds:
            per_second = (
                count / speed.seconds for count in (self.num_sequences, speed.num_tokens, speed.num_computed_tokens)
            )
            rates = "{:,.1f} sequences/s, {:,.0f} tokens/s effective, {:,.0f} computed".format(*per_second)
            r = f"{speed.num_tokens / speed.num_computed_tokens:.2f} tokens per computed token"
            _say(f"{'r':<12} {r}; {rates}, {speed.seconds:.0f} s")


@contextmanager
def _progress_at_last_step(trainer: L.Trainer) -> Iterator[None]:
    """Inside, if an epoch is over, Lightning's progress is what `on_train_batch_end` saw in its last step.

    A signal can arrive while `ModelCheckpoint` writes at the end of an epoch. Lightning (2.6.6) then raises after it
    has counted the epoch as completed. A run with `max_steps` that is resumed from these counts trains on other batches
    than one that was not interrupted.
    """
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress
    is_over = 0 < epochs.current.started == epochs.current.completed
    counts: list[tuple[Any, str]] = [
        *((progress, name) for progress in (epochs.current, epochs.total) for name in ("processed", "completed")),
        *((progress, "completed") for progress in (loop.batch_progress.current, loop.batch_progress.total)),
        (loop, "_batches_that_stepped"),
    ]
    for progress, name in counts:
        setattr(progress, name, getattr(progress, name) - is_over)
    try:
        yield
    finally:
        for progress, name in counts:
            setattr(progress, name, getattr(progress, name) + is_over)


def _as_json(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        name = next(name for name, value in record.items() if not _is_finite(value))
        raise UserError(
            f"predict: {name} of {record['row']} is not finite, which JSON cannot hold; 16 bits may overflow, so try "
            f"model.dtype: float32"
        ) from None


def _is_finite(value: Any) -> bool:
    """Whether all numbers in a value of a record are finite."""
    if isinstance(value, list | dict):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _say(line: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(line)
