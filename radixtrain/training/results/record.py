"""The record of a run: its progress, which every checkpoint keeps, `summary.json`, `loss.png` and the last lines."""

from __future__ import annotations

import csv
import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.checkpoints.folder import read_checkpoint, verify_checkpoint
from radixtrain.checkpoints.resolve import point
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, first_line, only_warns
from radixtrain.screen import print_lines, screen_failure
from radixtrain.training.fault_tolerance.run_state import load_weights
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.versions import versions

logger = logging.getLogger(__name__)

SUMMARY, PICTURE = "summary.json", "loss.png"
SECONDS_BETWEEN_PICTURES = 100.0  # drawing takes about one
LOWER_IS_BETTER = ("loss", "perplexity", "grad_norm")


@dataclass
class Progress:
    """The progress of a run, as its checkpoints keep it.

    step: optimizer steps. seconds: of training, in all processes. first_loss: of the first step; None before it.
    last_step: the metrics of the last one. validation: step and metrics of the last validation; None before it.
    metric: by which validations are compared. best: the best one, likewise. num_worse: validations after it.
    best_path: of its checkpoint: a name in the folder of checkpoints, or a path. None until it is saved; empty if it is
        not to be kept.
    logs: the folders of CSV loggers, relative to that of the run if inside, and the steps before each.
    """

    step: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_step: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] | None = None
    metric: str = ""
    best: dict[str, float] | None = None
    num_worse: int = 0
    best_path: str | None = None
    logs: list[Any] = field(default_factory=list)


class Record:
    """Collects the results of a run over all processes that take part in it, and writes them.

    output_dir: of the run. saver: writes a checkpoint when a validation is the best so far, and keeps that one.
    save_best: the metric of a validation by which the best weights are chosen; None for the last weights.
    patience: validations in a row that are not better, by `save_best` or else `eval_loss`, after which the run ends. A
        run that is resumed then takes no step, unless its patience is larger now. None never ends it.

    Of equal values the earlier one is the best. `summary.json` and `loss.png` are written with checkpoints, and when
    the run ends, for whatever reason.
    """

    def __init__(
        self, output_dir: Path, saver: SaveCheckpoints, save_best: str | None = None, patience: int | None = None
    ):
        self.output_dir, self.saver, self.patience = output_dir, saver, patience
        self.saves_best, self.metric = save_best is not None, save_best or "eval_loss"
        self.progress = Progress(metric=self.metric)
        self.ended: dict[str, Any] | None = None
        self.exported: dict[str, Any] | None = None
        self.first_step: int | None = None
        """Optimizer steps that were taken before this process; None until it trains."""
        self._drawn_at = 0.0
        saver.on_saved.append(self.saved)

    def restore(self, state: dict[str, Any], ckpt_path: str) -> None:
        """Continue from what the checkpoint of this path keeps."""
        self.progress = progress = Progress(**state)
        checkpoint = Path(ckpt_path).resolve()
        home = checkpoint.parent.parent
        is_moved = home != self.output_dir.resolve()
        progress.logs = [[str(home / folder) if is_moved else folder, step] for folder, step in progress.logs]
        if progress.metric != self.metric:
            if self.saves_best and progress.best_path != "":
                logger.warning("save_best: the best so far was by %s, and starts over", progress.metric)
            progress.metric, progress.best, progress.num_worse = self.metric, None, 0
        if not self.saves_best:
            progress.best_path = ""
        elif progress.best:
            self._restore_best(progress.best, checkpoint)

    def begin(self, loop: Any) -> None:
        """Take the loop of the run, whether or not anything is left to train."""
        self.loop, self.speed, self._earlier_seconds = loop, loop.module.speed, self.progress.seconds

    def started(self) -> None:
        """Note where the metrics of this process will be."""
        self.first_step, self._drawn_at = self.loop.global_step, time.monotonic()
        folders = [log.log_dir for log in self.loop.loggers if isinstance(log, CSVLogger)]
        first = self.loop.module.position.num_batches
        self.progress.logs += [[inside(Path(folder), self.output_dir), first] for folder in folders]

    def took_step(self) -> None:
        last_step = self.loop.module.last_step
        if self.progress.first_loss is None and last_step:
            self.progress.first_loss = float(last_step["loss"])

    def validated(self, metrics: dict[str, float]) -> None:
        """Compare a validation with the best one; if it is better, ask for a checkpoint."""
        progress = self.progress
        progress.validation = {"step": self.loop.global_step, **metrics}
        value = metrics.get(self.metric)
        if value is None:  # `on_nonfinite: skip` may leave all rows out
            return
        if progress.best and not is_better(self.metric, value, progress.best[self.metric]):
            progress.num_worse += 1
            return
        progress.best, progress.num_worse = progress.validation, 0
        progress.best_path = None if self.saves_best else ""
        if self.saves_best:
            self.saver.ask()

    @property
    def why_stop(self) -> str:
        """Say why the run ends early; empty if it does not."""
        if self.patience is None or self.progress.num_worse < self.patience:
            return ""
        count = f"{self.patience} validations" if self.patience > 1 else "a validation"
        return f"{self.metric} did not improve in {count}"

    def saved(self, path: Path) -> None:
        """Note a complete checkpoint, on every rank."""
        if self.progress.best and self.progress.best_path is None:
            self._keep(path)
        self._write(with_picture=time.monotonic() - self._drawn_at >= SECONDS_BETWEEN_PICTURES)

    def failed(self, error: BaseException) -> None:
        """Note the error that ends the run."""
        text = first_line(error) if isinstance(error, Exception) else str(error) or type(error).__name__
        self.ended = {"reason": type(error).__name__, "text": text, "complete": False}
        self._write()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: all up to the last step."""
        self._update()
        return asdict(self.progress)

    def choose_weights(self) -> dict[str, str]:
        """Load the weights to export into the module: the best ones with `save_best`, else the last ones stay.

        Returns the results of the run, by name. Empty if no step was taken.
        """
        step, progress = self.loop.global_step, self.progress
        kind, validation = "last", progress.validation
        if self.saves_best and progress.best is None:
            logger.warning("save_best: no validation took place, so model/ will hold the last weights")
        elif self.saves_best and progress.best and (progress.best["step"] == step or self._load_best()):
            kind, validation, step = "best", progress.best, int(progress.best["step"])
        self.exported = {"path": "model", "weights": kind, "step": step, "validation": validation}
        return self._results()

    def close(self, model_folder: Path) -> None:
        """Write, once the model is exported, `summary.json`, `loss.png`, and the last lines on the screen."""
        assert self.exported is not None, "choose_weights comes first"
        self.ended = status_of_run(self.loop, self)
        self._write()
        if not ranks().is_first:
            return
        logs, last, skipped = self.progress.logs, self.saver.last, self.loop.module.guard.num_skipped
        checkpoints, picture = self.output_dir / "checkpoints", self.output_dir / PICTURE
        print_lines(
            {
                "ended": self.ended["text"],
                **self._results(),
                "skipped": f"{skipped:,} steps that were not finite" if skipped else "",
                "model": f"{model_folder} (the {self.exported['weights']} weights, of step {self.exported['step']:,})",
                "best": str(self._best_path or ""),
                "last": str(last or ""),
                "checkpoints": str(checkpoints) if checkpoints.is_dir() and not last else "",
                "logs": str(self.output_dir / logs[-1][0]) if logs else "",
                "picture": str(picture) if picture.exists() else "",
            }
        )

    @property
    def _best_path(self) -> Path | None:
        path = self.progress.best_path if self.saves_best else None
        return self.saver.folder / path if path else None

    def _restore_best(self, best: dict[str, float], resumed: Path) -> None:
        """Look for the best checkpoint, starting from the one that the run resumes from."""
        progress = self.progress
        path = resumed.parent / (resumed.name if progress.best_path is None else progress.best_path)
        what = f"{self.metric} {best[self.metric]:.4f} at step {best['step']}"
        try:
            verify_checkpoint(path)
        except (UserError, OSError) as error:
            progress.best = None
            if progress.best_path != "":  # it was not kept for early stopping
                logger.warning("save_best: the best so far, %s, is lost, and starts over: %s", what, error)
        else:
            self._keep(path)

    def _keep(self, path: Path) -> None:
        """Keep this checkpoint as the best one, until a better one is written."""
        folder, self.saver.keep = self.saver.folder, path
        self.progress.best_path = inside(path, folder)
        if ranks().is_first:
            with only_warns(f"{folder / 'best'} cannot be written"):
                folder.mkdir(parents=True, exist_ok=True)
                point(folder, "best", path)

    def _load_best(self) -> bool:
        """Load the weights of the best checkpoint. Returns False, with a warning, if that fails."""
        if self._best_path is None:
            return False
        try:
            checkpoint = read_checkpoint(self._best_path, with_moments=False)
        except (UserError, OSError) as error:
            logger.warning("save_best: %s; model/ will hold the last weights, not the best", error)
            return False
        load_weights(self.loop.module, checkpoint)
        return True

    def _results(self) -> dict[str, str]:
        """Describe losses, metrics and speed, by name."""
        progress, speed = self.progress, self.speed
        if progress.first_loss is None:
            return {}
        loss = f"{progress.first_loss:.4f} -> {progress.last_step['loss']:.4f} in {progress.step:,} steps"
        entries = {"loss": loss, **_validation_of(self.exported or {})}
        if not speed.seconds:
            return entries
        effective, computed = speed.rates
        seconds = f"{speed.seconds:.0f} s of training"
        if progress.seconds > speed.seconds:
            seconds += f" since the run resumed, {progress.seconds:.0f} s in all"
        on = f" on {ranks().size} ranks" if ranks().size > 1 else ""
        rates = f"{effective:,.0f} effective, {computed:,.0f} computed{on}, {seconds}"
        return {**entries, "r": speed.r_text, "tokens/s": rates}

    def _update(self) -> None:
        """Read the results of the last step from the module; not after each step, since it waits for the device."""
        module, progress = self.loop.module, self.progress
        if module.last_step:
            progress.step, progress.seconds = module.position.num_steps, self._earlier_seconds + self.speed.seconds
            progress.last_step = {name: float(value) for name, value in module.last_step.items()}

    def _write(self, with_picture: bool = True) -> None:
        """Write `summary.json` and `loss.png`. A failure is a warning, and does not end a run."""
        self._update()
        if not ranks().is_first:
            return
        path = self.output_dir / SUMMARY
        with only_warns(f"{path} cannot be written"), writing_file(path) as partial:
            partial.write_text(f"{json.dumps(self._summary(), indent=2)}\n", encoding="utf-8")
        if with_picture:
            self._draw()

    def _summary(self) -> dict[str, Any]:
        """Return the summary. Paths are relative to the run's folder if inside; `ended` is null until the run ends.

        screen: why nothing more was printed; null if all was.
        """
        progress, speed, best, last = self.progress, self.speed, None, self.saver.last
        effective, computed = speed.rates if speed.seconds else (None, None)
        if progress.best and self._best_path:
            place = {"step": progress.best["step"], "path": inside(self._best_path, self.output_dir)}
            best = {"metric": self.metric, "value": progress.best[self.metric], **place}
        return {
            "ended": self.ended,
            "steps": progress.step,
            "loss": {"first": progress.first_loss, "last": progress.last_step.get("loss")},
            "validation": progress.validation,
            "best": best,
            "last": last and inside(last, self.output_dir),
            "exported": self.exported,
            "seconds": round(progress.seconds, 3),
            "ranks": ranks().size,
            "r": speed.r if speed.num_computed_tokens else None,
            "tokens_per_second": effective,
            "computed_tokens_per_second": computed,
            "logs": [{"path": folder, "first_step": step} for folder, step in progress.logs],
            "screen": screen_failure(),
            "versions": versions(),
        }

    def _draw(self) -> None:
        path, parts = self.output_dir / PICTURE, [(self.output_dir / log, step) for log, step in self.progress.logs]
        with only_warns(f"{path} cannot be drawn", Exception):  # matplotlib may raise anything
            write_curves(parts, path)
        self._drawn_at = time.monotonic()


def status_of_run(loop: Any, record: Any) -> dict[str, Any]:
    """Say why a finished `fit` ended. complete: whether nothing is left to do.

    reason: max_steps, max_epochs, early_stopping, max_time. text: for people.
    """
    step, total = loop.global_step, loop.num_steps
    is_new = record.first_step is not None and step > record.first_step
    at = f"step {step:,} of {total:,}" if total >= 0 else f"step {step:,}"
    if limit := _limit_reached(loop):
        if is_new:
            text = f"{at}: trainer.{limit} {getattr(loop, limit)} reached"
        elif not total:
            text = f"no step to take: trainer.{limit} is {getattr(loop, limit)}"
        else:
            text = f"nothing left to do: {at} was reached before; raise trainer.{limit} to continue"
        return {"reason": limit, "text": text, "complete": True}
    if why := record.why_stop:
        text = f"stopped early at {at}: {why}"
        if not is_new:
            text = f"nothing left to do: {text}; raise early_stopping to continue"
        return {"reason": "early_stopping", "text": text, "complete": True}
    has_checkpoint = record.saver.last is not None
    how = "resume with --ckpt_path last" if has_checkpoint else "no checkpoint was written to resume from"
    return {"reason": "max_time", "text": f"stopped by trainer.max_time at {at}; {how}", "complete": False}


def _limit_reached(loop: Any) -> str:
    """Return `max_steps` or `max_epochs`; empty if the run ended before either."""
    if 0 <= loop.max_steps <= loop.global_step:
        return "max_steps"
    is_endless = loop.max_epochs in (None, -1)
    return "" if is_endless or loop.module.position.num_batches < loop.length * loop.max_epochs else "max_epochs"


def is_better(metric: str, value: float, other: float) -> bool:
    """Return whether a value is better than another: lower for losses, perplexities and gradient norms, else higher."""
    return value < other if any(word in metric for word in LOWER_IS_BETTER) else value > other


def inside(path: Path, folder: Path) -> str:
    """Return the path, relative to the folder if it is inside."""
    path, folder = path.absolute(), folder.absolute()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _validation_of(exported: dict[str, Any]) -> dict[str, str]:
    """Return the metrics of the exported weights, or else of the last validation before them, with its step."""
    if not (validation := exported.get("validation")):
        return {}
    at = "" if validation["step"] == exported["step"] else f" at step {validation['step']:,}, the last validation"
    if exported["weights"] == "best":
        at = f" at step {validation['step']:,}, whose weights are exported"
    return {name: f"{value:.4f}{at}" for name, value in validation.items() if name != "step"}


# loss.png

Part = tuple[Path, int]
"""A folder of a CSV logger, and the steps taken before it was begun. A resumed run has several."""
DRAWN = ("loss", "eval_loss")


def write_curves(parts: Sequence[Part], path: Path) -> bool:
    """Draw the losses over the steps of a run, from its CSV logs; put the picture in place once it is whole.

    Returns False, and draws nothing, if no loss was logged.

    parts: of the run, in order. A dotted line is where the run was resumed.
    """
    curves = read_curves(parts)
    if not curves.get("loss"):
        return False
    from matplotlib.figure import Figure  # here, since it takes a second

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot([*points], [*points.values()], marker=".", markersize=3, label=name)
    for _, first_step in parts[1:]:
        axes.axvline(first_step, color="grey", linestyle=":")
    axes.set_xlabel("optimizer steps")
    axes.legend()
    with writing_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
    return True


def read_curves(parts: Sequence[Part]) -> dict[str, dict[float, float]]:
    """Read the metrics of `DRAWN`, each as step to value: the finite numbers of all complete lines.

    Steps that a later part repeats are taken from that part.
    """
    curves: dict[str, dict[float, float]] = {}
    for folder, first_step in parts:
        for name, points in curves.items():
            curves[name] = {step: value for step, value in points.items() if step <= first_step}
        path = folder / "metrics.csv"
        lines = path.read_bytes().decode(errors="replace").split("\n")[:-1] if path.is_file() else []
        for row in csv.DictReader(lines):
            for name in DRAWN:
                with suppress(KeyError, TypeError, ValueError):  # no such metric, or a damaged line
                    step, value = float(row["step"]), float(row[name])
                    if math.isfinite(value):
                        curves.setdefault(name, {})[step] = value
    return curves
