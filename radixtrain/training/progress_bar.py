"""Shows the progress of a run on stderr: a bar on a terminal, single lines anywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Any

from tqdm import tqdm

from radixtrain.distributed import ranks
from radixtrain.training.optimizer import num_steps_of_run

# Logged metric -> its name and form on the screen, the most watched first: a narrow terminal cuts the end.
SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "eval_loss": ("eval_loss", "{:.4f}"),
    "r": ("r", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "learning_rate": ("lr", "{:.1e}"),
    "grad_norm": ("grad_norm", "{:.2f}"),
}
SECONDS_BETWEEN_LINES = 1.0


def progress_bar() -> ProgressLines:
    """Make a bar if stderr is a terminal, lines if it is a file or a pipe."""
    return ProgressLines(is_bar=sys.stderr.isatty())


class PipeTolerantStream:
    """A stream that may fail without ending the run: the rest is dropped, and `failure` says why."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._dropped():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropped():
            self.stream.flush()

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the reader is gone, the disk is full
            self.failure = error.strerror or str(error)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())  # also for buffered text, and for libraries
            os.close(nothing)


@contextmanager
def screens() -> Iterator[None]:
    """Let a run continue after an error of stdout or stderr, since only files count."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = PipeTolerantStream(sys.stdout), PipeTolerantStream(sys.stderr)
    try:
        yield
    finally:
        screen_failure()
        sys.stdout, sys.stderr = before


def screen_failure() -> str | None:
    """Say why the output of a run is lost: `stdout: Broken pipe`. None if it is not, or outside of `screens`."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if isinstance(stream, PipeTolerantStream):
            stream.flush()
            if stream.failure:
                return f"{name}: {stream.failure}"
    return None


class ProgressLines:
    """Prints a line every `trainer.log_every_n_steps` steps, for the first and the last step, and after a validation.

    step 120/1500  loss 1.2340  r 7.9  tokens/s 12,345  lr 2.0e-05  grad_norm 1.32  eta 4:12

    At most one per second, so that a fast run does not fill the log. Stages other than `fit` show only the count.

    is_bar: instead show every step, and every batch of a validation, in one line of the terminal, with a bar and the
        metrics that fit into it.
    """

    def __init__(self, is_bar: bool = False) -> None:
        self.is_bar = is_bar
        self.bar: tqdm[Any] | None = None
        self.last_line = self.started = 0.0
        self.first_step = self.step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.started, self.first_step = time.perf_counter(), trainer.global_step
        self.step = self.first_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step, total = trainer.global_step, num_steps_of_run(trainer, getattr(pl_module, "steps_per_epoch", None))
        if step == self.step:  # the step was skipped: not finite
            return
        self.step = step
        is_end, is_due = step in (self.first_step + 1, total), self.is_bar or step % trainer.log_every_n_steps == 0
        if is_end or (is_due and self._is_time()):
            metrics = {k: v for k, v in trainer.callback_metrics.items() if not k.startswith("eval_")}
            shown = [f"{name} {value}" for name, value in _readable(metrics).items()]
            self._show("step", step, total, shown, self._eta(step, total))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval_")}
        if trainer.state.fn == "fit" and not trainer.sanity_checking and metrics:
            self._say(f"step {trainer.global_step}", *(f"{name} {value:.4f}" for name, value in metrics.items()))

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: object) -> None:
        self._count(trainer, "validate", args, trainer.num_val_batches)

    def on_test_batch_end(self, trainer: Any, module: Any, *args: object) -> None:
        self._count(trainer, "test", args, trainer.num_test_batches)

    def on_predict_batch_end(self, trainer: Any, module: Any, *args: object) -> None:
        self._count(trainer, "predict", args, trainer.num_predict_batches)

    def on_exception(self, *_: Any, **__: Any) -> None:
        """End the line of the bar, so that what is printed next has its own."""
        if self.bar is not None:
            self.bar.close()

    on_end = on_exception

    def _count(self, trainer: Any, stage: str, args: tuple[Any, ...], num_batches: list[int | float]) -> None:
        """Show how much of a stage is done. args: outputs, batch, batch index and loader index of the hook."""
        done, total = args[2] + 1, int(sum(num_batches))
        if (self.is_bar or trainer.state.fn == stage) and (done == total or self._is_time()):
            self._show(stage, done, total)

    def _is_time(self) -> bool:
        return self.is_bar or time.perf_counter() - self.last_line >= SECONDS_BETWEEN_LINES

    def _eta(self, step: int, total: int) -> str:
        """Estimate the time for the remaining steps at the pace so far, validations included."""
        pace = (time.perf_counter() - self.started) / (step - self.first_step)
        return f"eta {tqdm.format_interval(round(pace * (total - step)))}" if total > step else ""

    def _show(self, stage: str, done: int, total: int, metrics: Sequence[str] = (), eta: str = "") -> None:
        count = f"{stage} {done}/{total}" if total > 0 else f"{stage} {done}"
        if not self.is_bar:
            self._say(count, *metrics, eta)
            return
        if self.bar is None or self.bar.disable:
            self.bar = tqdm(bar_format="|{bar:8}| {desc}", dynamic_ncols=True, file=sys.stderr)
        room = get_terminal_size().columns - len("|12345678| ")
        while len(text := "  ".join(filter(None, (count, eta, *metrics)))) > room and metrics:
            metrics = metrics[:-1]
        self.bar.total, self.bar.n = max(total, done), done
        self.bar.set_description_str(text)

    def _say(self, *parts: str) -> None:
        if not ranks().is_first:
            return
        self.last_line = time.perf_counter()
        with tqdm.external_write_mode(file=sys.stderr):
            sys.stderr.write("  ".join(part for part in parts if part) + "\n")
        sys.stderr.flush()


def _readable(metrics: Any) -> dict[str, str]:
    """Format the metrics of `SHOWN`, in its order, with the metrics of answers after the losses."""
    of_answers = {name: (name, "{:.4f}") for name in metrics if name.startswith("eval_")}
    forms = {"loss": SHOWN["loss"], "eval_loss": SHOWN["eval_loss"], **of_answers, **SHOWN}
    return {short: form.format(float(metrics[name])) for name, (short, form) in forms.items() if name in metrics}
