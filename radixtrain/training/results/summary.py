"""The callback that collects what a run reaches, and says and writes it: closing lines, `summary.json`, `loss.png`."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from radixtrain.distributed import ranks
from radixtrain.errors import first_line
from radixtrain.training.results.best import Best, Saver, Validation, is_validation
from radixtrain.training.results.closing_lines import advice, best_of_callbacks, results, say_all
from radixtrain.training.results.curves import BestStep, LogPart, read_curves, write_curves
from radixtrain.training.results.ending import Ending, ending_by_error, ending_of
from radixtrain.training.results.reached import Exported, Reached
from radixtrain.training.results.saved_config import log_folder
from radixtrain.training.results.summary_file import SUMMARY, write_summary
from radixtrain.training.speed import Speed

__all__ = ["RunSummary"]

logger = logging.getLogger(__name__)

PICTURE = "loss.png"
DRAWING_SHARE = 0.01  # of the time of a run, that drawing at checkpoints may take
FIRST_DRAWING = 1.0  # seconds that the first one is assumed to take; on two CPU cores it took 0.5 to 1.0


class RunSummary(L.Callback):
    """Collects what a run reaches, over all processes that take part in it.

    output_dir: of the run. saver, best: of the run; None if it has none.

    `summary.json` and `loss.png` are written when a checkpoint is, and when the run ends, whatever ends it. The metrics
    of the CSV logger are on the disk before a checkpoint is, and the last step is among them.
    """

    def __init__(self, output_dir: Path, saver: Saver | None = None, best: Best | None = None):
        self.output_dir, self.saver, self.best = output_dir, saver, best
        self.reached = Reached()
        self.exported: Exported | None = None
        self.ending: Ending | None = None
        self.first_step: int | None = None
        """Optimizer steps that were taken before this process; None until it trains."""
        self._module: Any = None
        self._earlier_seconds = 0.0
        self._drawn_at, self._drawing_seconds = math.inf, FIRST_DRAWING
        if saver is not None:
            saver.on_saved.append(self._on_saved)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """After a checkpoint was read, whether or not anything is left to train."""
        self._module, self._earlier_seconds = module, self.reached.seconds
        self._take_stock()
        if trainer.ckpt_path:
            self.reached.of_folder(Path(trainer.ckpt_path).resolve().parent.parent, self.output_dir)

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.first_step, self._drawn_at = trainer.global_step, time.monotonic()
        for name in (PICTURE, SUMMARY) if ranks().is_first else ():  # of a run that was killed while it wrote one
            (self.output_dir / f".{name}.partial").unlink(missing_ok=True)
        folders = [str(Path(log.log_dir).absolute()) for log in _csv_loggers(trainer)]
        self.reached.parts += [LogPart(folder, module.position.num_batches) for folder in folders]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.reached.first_loss is None and module.last_step:
            self.reached.first_loss = float(module.last_step["loss"])

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Lightning keeps the metrics of the previous one, which this one may leave out."""
        if is_validation(trainer):
            for name in [each for each in trainer.callback_metrics if each.startswith("eval_")]:
                del trainer.callback_metrics[name]

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if is_validation(trainer):
            self.reached.validation = Validation.of(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for log in _csv_loggers(trainer):
            log.save()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._log_last_step(trainer)

    def on_exception(self, trainer: Any, module: L.LightningModule, exception: BaseException) -> None:
        if self.first_step is None or trainer.fast_dev_run:
            return
        self.ending = ending_by_error(exception)
        try:
            self._log_last_step(trainer)
        except OSError as error:  # a full disk may be what ended the run
            logger.warning("the metrics of the last step were not written: %s", error)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        self._take_stock()
        return self.reached.as_dict(self.output_dir)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reached = Reached.of(state_dict)

    def choose_weights(self, trainer: L.Trainer, module: Any) -> None:
        """Put the weights to export into the module: the best ones with `save_best`, else it has the last ones."""
        step, validation = trainer.global_step, self.reached.validation
        self.exported = Exported("last", step, validation)
        if self.best is None:
            return
        if self.best.found is None:
            logger.warning("save_best: no validation took place, so model/ will hold the last weights")
        elif self.best.found.step == step or self.best.load_into(module):
            self.exported = Exported("best", self.best.found.step, self.best.found)

    def results(self) -> dict[str, str]:
        """What the run reached, by name. Nothing if no step was taken."""
        assert self.exported is not None, "choose_weights comes first"
        return results(self.reached, self.exported, self._speed)

    def close(self, trainer: L.Trainer, module: Any, model_folder: Path) -> None:
        """Once the model is exported: the closing lines, `summary.json` and `loss.png`."""
        has_checkpoint = self.saver is not None and self.saver.last is not None
        first_step = trainer.global_step if self.first_step is None else self.first_step
        self.ending = ending_of(trainer, module, first_step, has_checkpoint)
        self._write()
        if ranks().is_first:
            say_all(self._closing_lines(trainer, module, model_folder))

    def _closing_lines(self, trainer: Any, module: Any, model_folder: Path) -> dict[str, str]:
        assert self.ending is not None
        checkpoints, picture = self.output_dir / "checkpoints", self.output_dir / PICTURE
        last = self.saver.last if self.saver else None
        skipped = module.guard.num_skipped
        return {
            "ended": self.ending.text,
            **self.results(),
            "skipped": f"{skipped:,} steps that were not finite" if skipped else "",
            "advice": advice(self._speed),
            "model": f"{model_folder} ({self.exported})",
            "best": str(self.best.path or "") if self.best else best_of_callbacks(trainer),
            "last": f"{last}" if last else "",
            "checkpoints": f"{checkpoints}" if checkpoints.is_dir() and not last else "",
            "logs": self._logs(trainer),
            "picture": f"{picture}" if picture.exists() else "",
        }

    def _logs(self, trainer: Any) -> str:
        """Of this process if it has trained, else of the one before; nothing if there are none."""
        if self.first_step is not None:
            return str(log_folder(trainer))
        if not self.reached.parts:
            return ""
        last, home = Path(self.reached.parts[-1].folder), self.output_dir.absolute()
        return str(self.output_dir / last.relative_to(home) if last.is_relative_to(home) else last)

    def _on_saved(self, path: Path) -> None:
        """Drawing takes at most `DRAWING_SHARE` of the time."""
        self._write(with_picture=time.monotonic() - self._drawn_at >= self._drawing_seconds / DRAWING_SHARE)

    def _take_stock(self) -> None:
        """Of the module, what a step leaves there: not after each step, since to read it waits for the device."""
        module, reached = self._module, self.reached
        if module is None or not module.last_step:
            return
        reached.step, reached.seconds = module.position.num_steps, self._earlier_seconds + module.speed.seconds
        reached.last_step = {name: float(value) for name, value in module.last_step.items()}

    def _write(self, with_picture: bool = True) -> None:
        """`summary.json` and `loss.png`. That neither can be written is said, and is no reason to end a run."""
        self._take_stock()
        if not ranks().is_first:
            return
        last = self.saver.last if self.saver else None
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            write_summary(self.output_dir, self.reached, self._speed, self.ending, self.best, last, self.exported)
        except OSError as error:
            logger.warning("summary.json was not written: %s", error)
        if with_picture:
            self._draw()

    def _draw(self) -> None:
        started, found = time.monotonic(), self.best.found if self.best else None
        best = BestStep(self.best.monitor, found.step) if self.best and found else None
        try:
            if not write_curves(self.reached.parts, self.output_dir / PICTURE, best) and self.ending:
                logger.info("%s is drawn from the metrics of the CSV logger, which this run has none of", PICTURE)
        except Exception as error:  # matplotlib may raise anything
            logger.warning("%s was not drawn: %s: %s", PICTURE, type(error).__name__, first_line(error))
        self._drawn_at = time.monotonic()
        self._drawing_seconds = self._drawn_at - started

    def _log_last_step(self, trainer: L.Trainer) -> None:
        """A run that ends between two steps that are logged has its last one in the metrics, too."""
        self._take_stock()
        assert self._module is not None
        taken = self._module.position.num_batches
        for log in _csv_loggers(trainer):
            log.save()
            logged = read_curves([LogPart(str(log.log_dir), 0)]).get("loss")
            if self._module.last_step and (logged is None or taken not in logged.steps):
                log.log_metrics(dict(self.reached.last_step), taken - 1)
                log.save()

    @property
    def _speed(self) -> Speed:
        return Speed() if self._module is None else self._module.speed


def _csv_loggers(trainer: L.Trainer) -> list[CSVLogger]:
    """Those that write here: Lightning's write on rank 0."""
    return [log for log in trainer.loggers if isinstance(log, CSVLogger) and ranks().is_first]
