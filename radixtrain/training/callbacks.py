"""What a run does besides its steps: verify, save on SIGTERM, print closing lines, write predictions."""

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
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from radixtrain.collators.steps import Step, StepCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError
from radixtrain.training.speed import Speed
from radixtrain.verification.oracle import Features
from radixtrain.verification.report import EquivalenceReport

__all__ = ["PredictionWriter", "RunSummary", "SaveOnSigterm", "VerifyFirstBatch"]

logger = logging.getLogger(__name__)

CUT_COST = 0.2  # share of computed tokens that a cut may add before the closing lines advise against it


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

    def results(self, trainer: L.Trainer, speed: Speed) -> dict[str, str]:
        """What the run reached, by name. Nothing if no step was taken."""
        metrics = trainer.callback_metrics
        if self.first_loss is None or not speed.seconds:
            return {}
        effective, computed = speed.num_tokens / speed.seconds, speed.num_computed_tokens / speed.seconds
        return {
            "loss": f"{self.first_loss:.4f} -> {float(metrics['loss']):.4f} in {trainer.global_step} steps",
            **{name: f"{float(metrics[name]):.4f}" for name in sorted(metrics, key=_place) if name.startswith("eval_")},
            "r": _sharing(speed),
            "tokens/s": f"{effective:,.0f} effective, {computed:,.0f} computed, {speed.seconds:.0f} s of training",
        }

    def print_closing_lines(self, trainer: L.Trainer, speed: Speed, model_folder: Path) -> None:
        """The results, and the folders. Nothing if no step was taken."""
        if not self.results(trainer, speed):
            return
        checkpoints = self.output_dir / "checkpoints"
        lines = {
            **self.results(trainer, speed),
            "advice": _advice(speed),
            "model": f"{model_folder} (the last weights)",
            "best": _best(trainer),
            "checkpoints": f"{checkpoints}" if checkpoints.is_dir() else "",
            "logs": f"{trainer.log_dir or self.output_dir}",
        }
        for name, text in lines.items():
            if text:
                _say(f"{name:<12} {text}")


class PredictionWriter(L.Callback):
    """Writes `predictions.jsonl`: one line for each sequence, with its scores or its answer, in the order of the file.

    {"row": "test.jsonl:1", "tokens": [3, 17], "logprobs": [-0.12, -0.03]}
    {"row": "test.jsonl:1", "answer": "Shelf two.", "num_tokens": 4, "logprob": -0.31, "finish_reason": "stop"}

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
        if isinstance(batch, Step):
            self.speed.add(batch)

    def on_predict_end(self, trainer: L.Trainer, module: Any) -> None:
        os.replace(self.partial, self.path)
        _say(f"predictions  {self.path} ({self.num_sequences} sequences)")
        speed = self.speed
        if module.hparams.generate:
            _say(f"{'r':<12} {module.answers.speed}")
        if speed.seconds:
            per_second = (
                count / speed.seconds for count in (self.num_sequences, speed.num_tokens, speed.num_computed_tokens)
            )
            rates = "{:,.1f} sequences/s, {:,.0f} tokens/s effective, {:,.0f} computed".format(*per_second)
            r = f"{speed.r:.2f} tokens per computed token"
            _say(f"{'r':<12} {r}; {rates}, {speed.seconds:.0f} s")


def _place(metric: str) -> tuple[bool, str]:
    """The loss, then what answers are worth."""
    return metric != "eval_loss", metric


def _sharing(speed: Speed) -> str:
    """r, and what the cut into micro-batches leaves of what it could be."""
    text = f"{speed.r:.2f} tokens per computed token"
    return f"{text}, {speed.best_r:.2f} at best (each step one micro-batch)" if speed.best_r else text


def _best(trainer: Any) -> str:
    """The checkpoint with the best value of a metric, if a callback watches one."""
    watching = [each for each in trainer.checkpoint_callbacks if getattr(each, "monitor", None)]
    found = [f"{each.best_model_path} ({each.monitor} {each.best_model_score:.4f})" for each in watching]
    return ", ".join(found)


def _advice(speed: Speed) -> str:
    """Nothing, unless `data.max_tokens` cuts steps and costs more than `CUT_COST`."""
    per_step = speed.num_micro_batches / speed.num_steps
    if speed.best_r is None or per_step <= 1 or speed.best_r < (1 + CUT_COST) * speed.r:
        return ""
    return (
        f"data.max_tokens cuts a step into {per_step:.1f} micro-batches on average, which repeat what they share: if "
        f"memory allows, a larger one raises r up to {speed.best_r:.2f}"
    )


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
