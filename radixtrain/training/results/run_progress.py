"""The progress of a run, kept in every checkpoint, and why it ended, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.checkpoints.folder import read_run
from radixtrain.distributed import ranks
from radixtrain.errors import first_line
from radixtrain.screen import screen
from radixtrain.text_files import read_text
from radixtrain.training.optimizer import num_steps_of_run
from radixtrain.training.results.best import StopEarly, Validation
from radixtrain.training.results.curves import LogPart
from radixtrain.training.speed import Speed

SUMMARY = "summary.json"
WIDTH = 12  # of the names of printed lines


class Exported(NamedTuple):
    """The weights in `model/`. kind: "best" or "last". step: optimizer steps that they took. validation: the last one
    before that; None without any.
    """

    kind: str
    step: int
    validation: Validation | None

    def __str__(self) -> str:
        return f"the {self.kind} weights, of step {self.step:,}"


@dataclass
class RunProgress:
    """The progress of a run.

    step: optimizer steps. first_loss: of the first step; None before it. last_step: the metrics of the last one.
    validation: the last one; None before it. parts: where the metrics are. seconds: of training, in all processes.
    """

    step: int = 0
    first_loss: float | None = None
    last_step: dict[str, float] = field(default_factory=dict)
    validation: Validation | None = None
    parts: list[LogPart] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self, output_dir: Path) -> dict[str, Any]:
        """Convert it for a checkpoint. Folders inside the run's become relative, so that a run can be moved."""
        return {
            **asdict(self),
            "parts": [[inside(Path(part.folder), output_dir), part.first_step] for part in self.parts],
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RunProgress:
        validation = state["validation"] and Validation(**state["validation"])
        return cls(**{**state, "validation": validation, "parts": [LogPart(*part) for part in state["parts"]]})

    def locate_logs(self, *homes: Path) -> None:
        """Find, after `from_dict`, relative folders in the first of these folders that has them."""
        for index, (folder, step) in enumerate(self.parts):
            candidates = [home.absolute() / folder for home in homes]
            path = next((path for path in candidates if path.is_dir()), candidates[0])
            self.parts[index] = LogPart(str(path), step)

    def results(self, exported: Exported, speed: Speed) -> dict[str, str]:
        """Return the results of the run, by name. Empty if no step was taken. speed: of this process."""
        if self.first_loss is None:
            return {}
        entries = {
            "loss": f"{self.first_loss:.4f} -> {self.last_step['loss']:.4f} in {self.step:,} steps",
            **_validation_of(exported),
        }
        if not speed.seconds:
            return entries
        effective, computed = speed.rates
        seconds = f"{speed.seconds:.0f} s of training"
        if self.seconds > speed.seconds:
            seconds += f" since the run resumed, {self.seconds:.0f} s in all"
        on = f" on {ranks().size} ranks" if ranks().size > 1 else ""
        rates = f"{effective:,.0f} effective, {computed:,.0f} computed{on}, {seconds}"
        return {**entries, "r": speed.r_text, "tokens/s": rates}


def _validation_of(exported: Exported) -> dict[str, str]:
    """Return the metrics of the exported weights, or else of the last validation before them, with its step."""
    if (validation := exported.validation) is None:
        return {}
    at = "" if validation.step == exported.step else f" at step {validation.step:,}, the last validation"
    if exported.kind == "best":
        at = f" at step {validation.step:,}, whose weights are exported"
    names = sorted(validation.metrics, key=lambda name: (name != "eval_loss", name))
    return {name: f"{validation.metrics[name]:.4f}{at}" for name in names}


def print_line(name: str, text: object, width: int = WIDTH) -> None:
    """Print a line on stdout, from rank 0. width: of the name."""
    if ranks().is_first:
        screen(soft_wrap=True, highlight=False, markup=False).print(f"{name:<{width}} {text}")


def print_lines(lines: Mapping[str, str]) -> None:
    """Print lines with their texts in one column, without those that have no text."""
    width = max([WIDTH, *(len(name) for name, text in lines.items() if text)])
    for name, text in lines.items():
        if text:
            print_line(name, text, width)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write it whole or not at all, with null for numbers that JSON cannot hold."""
    text = json.dumps(_finite(record), indent=2, allow_nan=False)
    with writing_file(path) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


def weights_text(model_name_or_path: str, ckpt_path: str | None) -> str:
    """Say which weights `validate`, `test` or `predict` evaluates: the path; the step, if a run here wrote them."""
    if ckpt_path is not None:
        path = Path(ckpt_path)
        return f"{path} (step {read_run(path)['step']:,})" if path.is_dir() else str(path)
    folder = Path(model_name_or_path)
    try:
        exported = json.loads(read_text(folder.parent / SUMMARY))["exported"]
        if exported["path"] == folder.name:
            return f"{model_name_or_path} (the {exported['weights']} weights of the run, of step {exported['step']:,})"
    except (OSError, ValueError, LookupError, TypeError):
        pass  # no summary beside the folder, or a damaged one
    return model_name_or_path


def inside(path: Path, folder: Path) -> str:
    """Return the path, relative to the folder if it is inside."""
    path, folder = path.absolute(), folder.absolute()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _finite(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class ExitStatus:
    """Why a run ended.

    reason: max_steps, max_epochs, early_stopping, max_time, or the type of an error. text: for people.
    is_complete: nothing is left to do.
    """

    reason: str
    text: str
    is_complete: bool


def status_of_run(trainer: Any, module: Any, first_step: int, has_checkpoint: bool) -> ExitStatus:
    """Return the status of a finished `fit`.

    module: a `RadixModule`. first_step: optimizer steps taken before this process.
    has_checkpoint: whether the run can be resumed.
    """
    step, is_new = trainer.global_step, trainer.global_step > first_step
    total = num_steps_of_run(trainer, module.steps_per_epoch)
    at = f"step {step:,} of {total:,}" if total >= 0 else f"step {step:,}"
    if limit := _limit_reached(trainer, module):
        if is_new:
            text = f"{at}: trainer.{limit} {getattr(trainer, limit)} reached"
        elif not total:
            text = f"no step to take: trainer.{limit} is {getattr(trainer, limit)}"
        else:
            text = f"nothing left to do: {at} was reached before; raise trainer.{limit} to continue"
        return ExitStatus(limit, text, is_complete=True)
    if why := next((each.why for each in trainer.callbacks if isinstance(each, StopEarly)), ""):
        text = f"stopped early at {at}: {why}"
        if not is_new:
            text = f"nothing left to do: {text}; raise early_stopping to continue"
        return ExitStatus("early_stopping", text, is_complete=True)
    how = "resume with --ckpt_path last" if has_checkpoint else "no checkpoint was written to resume from"
    return ExitStatus("max_time", f"stopped by trainer.max_time at {at}; {how}", is_complete=False)


def status_of_error(error: BaseException) -> ExitStatus:
    """Return the status of a `fit` that raised an error."""
    name = type(error).__name__
    text = first_line(error) if isinstance(error, Exception) else str(error) or name
    return ExitStatus(name, text, is_complete=False)


def _limit_reached(trainer: Any, module: Any) -> str:
    """Return `max_steps` or `max_epochs`; empty if the run ended before either."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return "max_steps"
    length = module.steps_per_epoch
    is_endless = length is None or trainer.max_epochs in (None, -1)
    return "" if is_endless or module.position.num_batches < length * trainer.max_epochs else "max_epochs"
