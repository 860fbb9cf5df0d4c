"""The callbacks of a command: those of the configuration, then ours, in the order in which Lightning calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from radixtrain.training.devices.settings import as_list
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from radixtrain.training.progress_bar import progress_bar
from radixtrain.training.results.best import Best, StopEarly
from radixtrain.training.results.prediction_file import PredictionWriter
from radixtrain.training.results.summary import RunSummary
from radixtrain.training.start.preflight import check_judges, check_monitors


class RunCallbacks:
    """Ours know each other: a request to stop and a new best value have the saver write, and the summary says both.

    settings: of the command, with its callbacks and `evaluate_generation` as instances.
    output_dir: of the run.
    has_validation: whether it has rows to validate on.

    requests: what signals and files ask for. saver: writes the checkpoints. best: the best one; None without
    `save_best`. evaluation: generates answers after a validation. summary: of what the run reaches. all: the callbacks.

    Raises UserError if one of them watches what the run does not measure.
    """

    def __init__(self, settings: Any, output_dir: Path, has_validation: bool):
        own = as_list(settings.trainer.callbacks)
        self.requests = Requests(output_dir)
        self.evaluation = settings.evaluate_generation
        self.evaluation.interruptible = self.requests.at_once
        self.saver = _saver(settings, output_dir, self.requests, is_scheduled=not _has(own, Checkpoint))
        metric, patience = settings.save_best, settings.early_stopping
        self.best = None if metric is None else Best(metric, self.saver)
        self.summary = RunSummary(output_dir, self.saver, self.best)
        self.all = [
            *own,
            self.summary,
            PredictionWriter(output_dir),
            *([self.evaluation] if self.evaluation.logged else []),
            *([self.best] if self.best else []),
            *([] if patience is None else [StopEarly(metric or "eval_loss", patience)]),
            self.saver,  # after those that judge a validation and ask it for a checkpoint
        ]
        if settings.trainer.enable_progress_bar is not False and not _has(own, ProgressBar):
            self.all.append(progress_bar())
        check_monitors(self.all, has_validation, self.evaluation.logged)
        check_judges(self.all, settings.trainer)

    @property
    def has_checkpoint_callback(self) -> bool:
        """Whether one of them is Lightning's or the user's own; without any, Lightning would add one."""
        return _has(self.all, Checkpoint)

    @property
    def most_checkpoints(self) -> int:
        """That are on the disk at once."""
        return self.saver.most_at_once + (self.best is not None)


def _saver(settings: Any, output_dir: Path, requests: Requests, is_scheduled: bool) -> SaveCheckpoints:
    """is_scheduled: False if a callback of the configuration writes the checkpoints."""
    return SaveCheckpoints(
        output_dir / "checkpoints",
        requests,
        every_steps=settings.save_every_steps,
        every_minutes=settings.save_every_minutes,
        total_limit=settings.save_total_limit,
        is_scheduled=is_scheduled,
        is_enabled=settings.trainer.enable_checkpointing is not False and not settings.trainer.fast_dev_run,
    )


def _has(callbacks: list[Any], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)
