"""The best checkpoint by a metric of the validations, and the end of a run whose metric no longer improves."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from radixtrain.checkpoints.folder import read_checkpoint, verify_checkpoint
from radixtrain.checkpoints.resolve import point
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, only_warns
from radixtrain.training.fault_tolerance.run_state import load_weights
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints

logger = logging.getLogger(__name__)

LOWER_IS_BETTER = ("loss", "perplexity", "grad_norm")


@dataclass(frozen=True)
class Validation:
    """The results of a validation. step: optimizer steps before it. metrics: by name: eval_loss, ..."""

    step: int
    metrics: dict[str, float]

    @classmethod
    def of(cls, trainer: Any) -> Validation:
        """Read the results of the validation that has just ended."""
        measured = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval_")}
        return cls(trainer.global_step, measured)


class Best:
    """Keeps the checkpoint with the best value of a metric; the link `checkpoints/best` points to it.

    metric: one that every validation logs; see `is_lower_better`. Of equal values the earlier one is kept; a value that
        is missing or not finite is never the best.
    saver: writes a checkpoint when a validation is the best so far, and keeps that one.

    validation: the best one; None before the first one. path: of its checkpoint; None until it is written.
    """

    def __init__(self, metric: str, saver: SaveCheckpoints):
        self.monitor, self.saver = metric, saver
        self.validation: Validation | None = None
        self.path: Path | None = None
        self._loaded: dict[str, Any] = {}
        saver.on_saved.append(self._on_saved)

    @property
    def value(self) -> float:
        """Return the metric of the best validation."""
        assert self.validation is not None
        return self.validation.metrics[self.monitor]

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Take over the best checkpoint of the resumed run, if it is there and whole."""
        if not self._loaded:
            return
        if self._loaded["metric"] != self.monitor:
            logger.warning("save_best: the best so far was by %s, and starts over", self._loaded["metric"])
        elif self._loaded["step"] is not None:
            self._take(Path(trainer.ckpt_path))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not is_validation(trainer):
            return
        validation = Validation.of(trainer)
        if self._is_better(validation):
            self.validation, self.path = validation, None
            self.saver.ask()

    def load_into(self, module: nn.Module) -> bool:
        """Load the weights of the best checkpoint into the module. Returns False, with a warning, if that fails."""
        if self.path is None:
            return False
        try:
            checkpoint = read_checkpoint(self.path, with_moments=False)
        except (UserError, OSError) as error:
            logger.warning("save_best: %s; model/ will hold the last weights, not the best", error)
            return False
        load_weights(module, checkpoint)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best so far.

        path is None when this checkpoint is itself the best; otherwise its name, or its full path in another folder.
        """
        best, path = self.validation, self.path and str(self.path.absolute())
        if self.path and self.path.parent.absolute() == self.saver.folder.absolute():
            path = self.path.name
        step, metrics = (None, {}) if best is None else (best.step, best.metrics)
        return {"metric": self.monitor, "step": step, "metrics": metrics, "path": path}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _take(self, resumed: Path) -> None:
        """Look for the earlier best checkpoint, starting from the one that the run resumes from."""
        path = resumed.resolve().parent / (self._loaded["path"] or resumed.resolve().name)
        best = f"{self.monitor} {self._loaded['metrics'][self.monitor]:.4f} at step {self._loaded['step']}"
        try:
            verify_checkpoint(path)
        except (UserError, OSError) as error:
            logger.warning("save_best: the best so far, %s, is lost, and starts over: %s", best, error)
            return
        self.validation = Validation(self._loaded["step"], self._loaded["metrics"])
        self._keep(path)

    def _is_better(self, validation: Validation) -> bool:
        value = validation.metrics.get(self.monitor, math.nan)  # `on_nonfinite: skip` may leave all rows out
        if not math.isfinite(value):
            return False
        return self.validation is None or is_better(self.monitor, value, self.value)

    def _on_saved(self, path: Path) -> None:
        if self.validation is not None and self.path is None:
            self._keep(path)

    def _keep(self, path: Path) -> None:
        """Keep this checkpoint in place of the previous best one."""
        self.saver.keep = self.path = path  # until a better one is written
        if ranks().is_first:
            with only_warns(f"{self.saver.folder / 'best'} cannot be written"):
                self.saver.folder.mkdir(parents=True, exist_ok=True)
                point(self.saver.folder, "best", path)


class StopEarly:
    """Ends a run after `patience` validations without a better value, or at a value that is not finite.

    A run that is resumed after such an end takes no step, unless its configured patience is larger now.

    metric: one that every validation logs; see `is_lower_better`.
    """

    def __init__(self, metric: str, patience: int):
        self.monitor, self.patience = metric, patience
        self.best: float | None = None
        self.num_worse = 0
        """Validations since the best one."""

    @property
    def why(self) -> str:
        """Say why it stops the run; empty if it does not."""
        if self.best is not None and not math.isfinite(self.best):
            return f"{self.monitor} was not finite"
        count = f"{self.patience} validations" if self.patience > 1 else "a validation"
        return f"{self.monitor} did not improve in {count}" if self.num_worse >= self.patience else ""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = trainer.should_stop or bool(self.why)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        value = Validation.of(trainer).metrics.get(self.monitor)
        if not is_validation(trainer) or value is None:
            return
        if not math.isfinite(value) or self.best is None or is_better(self.monitor, value, self.best):
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1
        trainer.should_stop = trainer.should_stop or bool(self.why)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.num_worse = state_dict["best"], state_dict["num_worse"]


def is_better(metric: str, value: float, other: float) -> bool:
    """Return whether a value of a metric is better than another one."""
    return value < other if is_lower_better(metric) else value > other


def is_lower_better(metric: str) -> bool:
    """Return whether lower is better: for losses, perplexities and gradient norms, and for no other metric."""
    return any(word in metric for word in LOWER_IS_BETTER)


def is_validation(trainer: Any) -> bool:
    """Return whether a validation of `fit` counts: not the steps tried before training."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking
