"""The parts of a run, which a runner tells what happens, in the order in which it tells them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from radixtrain.errors import UserError, did_you_mean
from radixtrain.settings.commands import Run
from radixtrain.training.answers.metrics import OWN_METRICS
from radixtrain.training.answers.predictions import PredictionWriter
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from radixtrain.training.progress_bar import progress_bar
from radixtrain.training.results.best import Best, StopEarly
from radixtrain.training.results.summary import RunSummary

# What a run logs.
METRICS = (
    *("loss", "grad_norm", "learning_rate", "r", "best_r"),
    *("tokens_per_second", "computed_tokens_per_second", "eval_loss", "epoch", "step"),
)
VALIDATION_METRICS = "eval_loss is, and eval_ followed by the name of evaluate_generation.metric"


class RunParts:
    """The parts of a run, which work together: a stop request and a new best value make the saver write.

    settings: of the command. evaluation: an `EvaluateGeneration`. output_dir: of the run.
    has_validation: whether it has rows to validate on.

    requests: of signals and files. saver: writes the checkpoints. best: the best one; None without
    `save_best`. evaluation: generates answers after a validation. summary: of the results. all: the parts.

    Raises UserError if one of them cannot work here, or watches a metric that the run does not measure.
    """

    def __init__(self, settings: Run, evaluation: Any, output_dir: Path, has_validation: bool):
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
            self.saver,  # after the callbacks that read a validation and request a checkpoint
        ]
        if settings.trainer.enable_progress_bar is not False:
            self.all.append(progress_bar())
        check_monitors(self.all, has_validation, self.evaluation.logged)
        check_judges(self.all, settings.trainer)

    @property
    def most_checkpoints(self) -> int:
        """Count the checkpoints that are on the disk at once: those that are kept, and the one being written."""
        saver = self.saver
        return (saver.total_limit + 1) * saver.is_enabled + (self.best is not None)


def _saver(settings: Run, output_dir: Path, requests: Requests) -> SaveCheckpoints:
    return SaveCheckpoints(
        output_dir / "checkpoints",
        requests,
        every_steps=settings.save_every_steps,
        every_minutes=settings.save_every_minutes,
        total_limit=settings.save_total_limit,
        is_enabled=settings.trainer.enable_checkpointing is not False and not settings.trainer.fast_dev_run,
    )


def check_monitors(callbacks: Iterable[Any], has_validation: bool, of_answers: str | None = None) -> None:
    """Raise UserError if a callback watches a metric that the run does not log.

    of_answers: the metric of `evaluate_generation`, such as `eval_exact_match`; None if it is off.
    """
    logged = METRICS if of_answers is None else (*METRICS, of_answers)
    for callback in callbacks:
        watched = getattr(callback, "monitor", None)
        if not isinstance(watched, str):
            continue
        ours = getattr(callback, "configured_by", "")  # our own callbacks read validation metrics
        key = ours or f"trainer.callbacks: {type(callback).__name__}: monitor"
        if watched not in logged and watched.removeprefix("eval_") in OWN_METRICS:
            metric = watched.removeprefix("eval_")
            raise UserError(f"{key}: {watched} is not logged: set evaluate_generation.metric: {metric}")
        if watched not in logged:
            possible = [name for name in logged if not ours or name.startswith("eval_")]
            meant = did_you_mean(watched, possible, f"; a run logs {', '.join(possible)}")
            raise UserError(f"{key}: no metric {watched!r}{meant}")
        if ours and not watched.startswith("eval_"):
            raise UserError(f"{key}: {watched} is not measured by a validation; {VALIDATION_METRICS}")
        if watched == "eval_loss" and not has_validation:
            raise UserError(f"{key}: eval_loss needs rows for it: set data.validation_file or data.val_size")


def check_judges(callbacks: Iterable[Any], settings: Any) -> None:
    """Raise UserError if `save_best` or `early_stopping` is set in a run without validations or checkpoints.

    settings: of `trainer`.
    """
    for name in (getattr(callback, "configured_by", "") for callback in callbacks):
        if name and settings.limit_val_batches == 0:
            raise UserError(f"{name} needs validations, and trainer.limit_val_batches is 0; leave one of them out")
        if name == "save_best" and settings.enable_checkpointing is False:
            raise UserError(f"{name} needs checkpoints, and trainer.enable_checkpointing is false; leave one out")
