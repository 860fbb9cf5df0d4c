"""The parts of a run, which a runner tells what happens, in the order in which it tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixtrain.errors import UserError, did_you_mean
from radixtrain.settings.commands import RunSettings
from radixtrain.training.answers.metrics import OWN_METRICS
from radixtrain.training.answers.predictions import PredictionWriter
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from radixtrain.training.progress_bar import progress_bar
from radixtrain.training.results.best import Best, StopEarly
from radixtrain.training.results.summary import RunSummary


class RunParts:
    """The parts of a run, which work together: a stop request and a new best value make the saver write.

    settings: of the command. evaluation: an `EvaluateGeneration`. output_dir: of the run.
    has_validation: whether it has rows to validate on.

    requests: of signals and files. saver: writes the checkpoints. best: the best one; None without
    `save_best`. evaluation: generates answers after a validation. summary: of the results. all: the parts.

    Raises UserError if `save_best` or `early_stopping` cannot work here.
    """

    def __init__(self, settings: RunSettings, evaluation: Any, output_dir: Path, has_validation: bool):
        check_judges(settings, has_validation, evaluation.logged)
        self.requests = Requests(output_dir)
        self.evaluation = evaluation
        self.evaluation.interruptible = self.requests.at_once
        self.saver = _saver(settings, output_dir, self.requests)
        metric, patience = settings.save_best, settings.early_stopping
        self.best = None if metric is None else Best(metric, self.saver)
        self.summary = RunSummary(output_dir, self.saver, self.best)
        self.all = [
            self.summary,
            PredictionWriter(output_dir),
            *([self.evaluation] if self.evaluation.logged else []),
            *([self.best] if self.best else []),
            *([] if patience is None else [StopEarly(metric or "eval_loss", patience)]),
            self.saver,  # after the parts that read a validation and request a checkpoint
        ]
        if settings.trainer.enable_progress_bar is not False:
            self.all.append(progress_bar())

    @property
    def most_checkpoints(self) -> int:
        """Count the checkpoints that are on the disk at once: those that are kept, and the one being written."""
        saver = self.saver
        return (saver.total_limit + 1) * saver.is_enabled + (self.best is not None)


def _saver(settings: RunSettings, output_dir: Path, requests: Requests) -> SaveCheckpoints:
    return SaveCheckpoints(
        output_dir / "checkpoints",
        requests,
        every_steps=settings.save_every_steps,
        every_minutes=settings.save_every_minutes,
        total_limit=settings.save_total_limit,
        is_enabled=settings.trainer.enable_checkpointing is not False,
    )


def check_judges(settings: RunSettings, has_validation: bool, of_answers: str | None) -> None:
    """Raise UserError if `save_best` or `early_stopping` lacks validations, checkpoints, or the metric that it watches.

    of_answers: the metric of `evaluate_generation`, such as `eval_exact_match`; None if it is off.
    """
    watched, measured = settings.save_best or "eval_loss", ["eval_loss", *([of_answers] if of_answers else [])]
    metric = watched.removeprefix("eval_")
    for key in ("save_best", "early_stopping"):
        if getattr(settings, key) is None:
            continue
        if watched not in measured and metric in OWN_METRICS:
            raise UserError(f"{key}: {watched} is not measured: set evaluate_generation.metric: {metric}")
        if watched not in measured:
            meant = did_you_mean(watched, measured, f"; a validation measures {', '.join(measured)}")
            raise UserError(f"{key}: no metric {watched!r}{meant}")
        if watched == "eval_loss" and not has_validation:
            raise UserError(f"{key}: eval_loss needs rows for it: set data.validation_file or data.val_size")
        if settings.trainer.limit_val_batches == 0:
            raise UserError(f"{key} needs validations, and trainer.limit_val_batches is 0; leave one of them out")
        if key == "save_best" and settings.trainer.enable_checkpointing is False:
            raise UserError(f"{key} needs checkpoints, and trainer.enable_checkpointing is false; leave one out")
