"""A callback that collects the results of a run, and writes `summary.json`, `loss.png` and the last lines."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from radixtrain.distributed import ranks
from radixtrain.errors import only_warns
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.progress_bar import screen_failure
from radixtrain.training.results.best import Best, Validation, is_validation
from radixtrain.training.results.curves import LogPart, write_curves
from radixtrain.training.results.run_progress import (
    SUMMARY,
    ExitStatus,
    Exported,
    RunProgress,
    inside,
    print_lines,
    status_of_error,
    status_of_run,
    write_json,
)
from radixtrain.training.results.saved_config import log_folder
from radixtrain.training.speed import Speed
from radixtrain.versions import versions

logger = logging.getLogger(__name__)

PICTURE = "loss.png"
DRAWING_SHARE = 0.01  # share of a run's time that drawing at checkpoints may take
FIRST_DRAWING = 1.0  # seconds that the first one is assumed to take; on two CPU cores it took 0.5 to 1.0
CUT_COST = 0.2  # share of computed tokens that a cut may add before the last lines advise against it


class RunSummary:
    """Collects the results of a run, over all processes that take part in it.

    output_dir, saver: of the run. best: of the run; None if it has none.

    `summary.json` and `loss.png` are written with each checkpoint, and when the run ends, for whatever reason. The
    metrics of the CSV logger are on the disk before a checkpoint is, and the first and the last step are among them.
    """

    def __init__(self, output_dir: Path, saver: SaveCheckpoints, best: Best | None):
        self.output_dir, self.saver, self.best = output_dir, saver, best
        self.progress, self.speed = RunProgress(), Speed()
        self.exported: Exported | None = None
        self.status: ExitStatus | None = None
        self.first_step: int | None = None
        """Optimizer steps that were taken before this process; None until it trains."""
        self._module: Any = None
        self._earlier_seconds = 0.0
        self._drawn_at, self._drawing_seconds = math.inf, FIRST_DRAWING
        saver.on_saved.append(self._on_saved)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Begin after a checkpoint was read, whether or not anything is left to train."""
        self._module, self.speed, self._earlier_seconds = module, module.speed, self.progress.seconds
        if trainer.ckpt_path:
            self.progress.locate_logs(Path(trainer.ckpt_path).resolve().parent.parent, self.output_dir)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.first_step, self._drawn_at = trainer.global_step, time.monotonic()
        folders = [str(Path(log.log_dir).absolute()) for log in _csv_loggers(trainer)]
        self.progress.parts += [LogPart(folder, module.position.num_batches) for folder in folders]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.progress.first_loss is None and module.last_step:
            self.progress.first_loss = float(module.last_step["loss"])

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Drop the metrics of the previous validation, which Lightning keeps and this one may leave out."""
        if is_validation(trainer):
            for name in [name for name in trainer.callback_metrics if name.startswith("eval_")]:
                del trainer.callback_metrics[name]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if is_validation(trainer):
            self.progress.validation = Validation.of(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._log_step(trainer)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self.first_step is None:
            return
        self.status = status_of_error(exception)
        try:
            self._log_step(trainer)
        except OSError as error:  # a full disk may be what ended the run
            logger.warning("the metrics of the last step were not written: %s", error)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        self._read_module()
        return self.progress.as_dict(self.output_dir)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress = RunProgress.from_dict(state_dict)

    def choose_weights(self, trainer: Any, module: Any) -> dict[str, str]:
        """Load the weights to export into the module: the best ones with `save_best`, else the last ones stay.

        Returns the results of the run, by name. Empty if no step was taken.
        """
        step, best = trainer.global_step, self.best
        self.exported = Exported("last", step, self.progress.validation)
        if best and best.validation is None:
            logger.warning("save_best: no validation took place, so model/ will hold the last weights")
        elif best and best.validation and (best.validation.step == step or best.load_into(module)):
            self.exported = Exported("best", best.validation.step, best.validation)
        return self.progress.results(self.exported, self.speed)

    def close(self, trainer: Any, module: Any, model_folder: Path) -> None:
        """Write, once the model is exported, `summary.json`, `loss.png`, and the last lines on the screen."""
        assert self.exported is not None, "choose_weights comes first"
        last = self.saver.last
        first_step = trainer.global_step if self.first_step is None else self.first_step
        self.status = status_of_run(trainer, module, first_step, has_checkpoint=last is not None)
        self._write()
        checkpoints, picture, skipped = (
            self.output_dir / "checkpoints",
            self.output_dir / PICTURE,
            module.guard.num_skipped,
        )
        if not ranks().is_first:
            return
        print_lines(
            {
                "ended": self.status.text,
                **self.progress.results(self.exported, self.speed),
                "skipped": f"{skipped:,} steps that were not finite" if skipped else "",
                "advice": _advice(self.speed),
                "model": f"{model_folder} ({self.exported})",
                "best": str(self.best.path or "") if self.best else "",
                "last": str(last or ""),
                "checkpoints": str(checkpoints) if checkpoints.is_dir() and not last else "",
                "logs": self._logs(trainer),
                "picture": str(picture) if picture.exists() else "",
            }
        )

    def _logs(self, trainer: Any) -> str:
        """Name the logs of this process if it has trained, else of the previous one; empty if there are none."""
        if self.first_step is not None:
            return str(log_folder(trainer))
        parts = self.progress.parts
        return str(self.output_dir / inside(Path(parts[-1].folder), self.output_dir)) if parts else ""

    def _on_saved(self, path: Path) -> None:
        """Write; drawing takes at most `DRAWING_SHARE` of the time."""
        self._write(with_picture=time.monotonic() - self._drawn_at >= self._drawing_seconds / DRAWING_SHARE)

    def _read_module(self) -> None:
        """Read the results of the last step from the module; not after each step, since it waits for the device."""
        module, progress = self._module, self.progress
        if module is not None and module.last_step:
            progress.step, progress.seconds = module.position.num_steps, self._earlier_seconds + self.speed.seconds
            progress.last_step = {name: float(value) for name, value in module.last_step.items()}

    def _write(self, with_picture: bool = True) -> None:
        """Write `summary.json` and `loss.png`. A failure is a warning, and does not end a run."""
        self._read_module()
        if not ranks().is_first:
            return
        with only_warns(f"{self.output_dir / SUMMARY} cannot be written"):
            write_json(self.output_dir / SUMMARY, self._record())
        if with_picture:
            self._draw()

    def _record(self) -> dict[str, Any]:
        """Return the record. Paths are relative to the run's folder if inside; `ended` is null while the run continues.

        screen: why nothing more was printed; null if all was.
        """
        progress, speed, status, exported, best = self.progress, self.speed, self.status, self.exported, None
        effective, computed = speed.rates if speed.seconds else (None, None)
        if self.best and self.best.validation and self.best.path:
            place = {"step": self.best.validation.step, "path": inside(self.best.path, self.output_dir)}
            best = {"metric": self.best.monitor, "value": self.best.value, **place}
        last = self.saver.last
        if exported:
            weights = {"path": "model", "weights": exported.kind, "step": exported.step}
        return {
            "ended": status and {"reason": status.reason, "text": status.text, "complete": status.is_complete},
            "steps": progress.step,
            "loss": {"first": progress.first_loss, "last": progress.last_step.get("loss")},
            "validation": _as_record(progress.validation),
            "best": best,
            "last": last and inside(last, self.output_dir),
            "exported": exported and {**weights, "validation": _as_record(exported.validation)},
            "seconds": round(progress.seconds, 3),
            "ranks": ranks().size,
            "r": speed.r if speed.num_computed_tokens else None,
            "tokens_per_second": effective,
            "computed_tokens_per_second": computed,
            "logs": [
                {"path": inside(Path(folder), self.output_dir), "first_step": step} for folder, step in progress.parts
            ],
            "screen": screen_failure(),
            "versions": versions(),
        }

    def _draw(self) -> None:
        started = time.monotonic()
        with only_warns(f"{self.output_dir / PICTURE} cannot be drawn", Exception):  # matplotlib may raise anything
            if not write_curves(self.progress.parts, self.output_dir / PICTURE) and self.status:
                logger.info("%s is drawn from the metrics of the CSV logger, which this run has none of", PICTURE)
        self._drawn_at = time.monotonic()
        self._drawing_seconds = self._drawn_at - started

    def _log_step(self, trainer: Any) -> None:
        """Log the last step unless it was logged, so that the first and the last step of a run are."""
        self._read_module()
        trainer.log_last_step()


def _advice(speed: Speed) -> str:
    """Advise a larger `data.max_tokens` if it cuts steps and costs more than `CUT_COST`; empty otherwise."""
    per_step = speed.num_micro_batches / max(1, speed.num_steps)
    if speed.best_r is None or per_step <= 1 or speed.best_r < (1 + CUT_COST) * speed.r:
        return ""
    return (
        f"data.max_tokens cuts a step into {per_step:.1f} micro-batches on average, which repeat what they share: if "
        f"memory allows, a larger one raises r up to {speed.best_r:.2f}"
    )


def _as_record(validation: Validation | None) -> dict[str, Any] | None:
    return None if validation is None else {"step": validation.step, **validation.metrics}


def _csv_loggers(trainer: Any) -> list[CSVLogger]:
    """Return the loggers that write in this process: Lightning's write on rank 0."""
    return [log for log in trainer.loggers if isinstance(log, CSVLogger) and ranks().is_first]
