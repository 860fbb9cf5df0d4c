"""How fast a run goes: tokens per second, and its progress on stderr, as a bar on a terminal or else as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from tqdm import tqdm

from radixtrain.collators.steps import Step
from radixtrain.distributed import ranks

# Metric of a step -> its name and form on the screen, the most watched first: a narrow terminal cuts the end.
SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "r": ("r", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "learning_rate": ("lr", "{:.1e}"),
    "grad_norm": ("grad_norm", "{:.2f}"),
}
SECONDS_BETWEEN_LINES = 1.0


class Speed:
    """Tokens per second of the last step and of the whole run: effective ones, and computed ones (rows).

    num_tokens: effective ones, which an ordinary trainer computes: those of whole chats, if they were split into turns.
    num_row_tokens: T of the same rows, which is more for split chats.
    num_unique_tokens: rows if every step had been one micro-batch; None with `dedup: false`.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_row_tokens = self.num_computed_tokens = self.num_steps = self.num_micro_batches = 0
        self.num_unique_tokens: int | None = 0
        self.seconds = self.last = 0.0

    def start(self) -> None:
        """Start timing the next step."""
        self.last = time.perf_counter()

    def add(self, step: Step) -> tuple[float, float]:
        """Count a step that ends now. Returns its effective and its computed tokens per second."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        self.seconds += elapsed
        self.num_steps += 1
        self.num_micro_batches += len(step.micro_batches)
        self.num_tokens += step.num_ordinary_tokens
        self.num_row_tokens += step.num_tokens
        self.num_computed_tokens += step.num_computed_tokens
        if self.num_unique_tokens is None or step.num_unique_tokens is None:
            self.num_unique_tokens = None
        else:
            self.num_unique_tokens += step.num_unique_tokens
        return step.num_ordinary_tokens / elapsed, step.num_computed_tokens / elapsed

    @property
    def rates(self) -> tuple[float, float]:
        """Return effective and computed tokens per second, over all steps."""
        return self.num_tokens / self.seconds, self.num_computed_tokens / self.seconds

    @property
    def r(self) -> float:
        """Return tokens per computed token, over all steps."""
        return self.num_tokens / self.num_computed_tokens

    @property
    def best_r(self) -> float | None:
        """Return r if every step had been one micro-batch. None with `dedup: false`."""
        return self.num_tokens / self.num_unique_tokens if self.num_unique_tokens else None

    @property
    def r_text(self) -> str:
        """Describe r, by both baselines if chats were split, and the best r."""
        r = f"{self.r:.2f} tokens per computed token"
        best = f"{self.best_r:.2f} at best (each step one micro-batch)" if self.best_r else ""
        is_split = self.num_tokens < self.num_row_tokens
        rows = f"{self.num_row_tokens / self.num_computed_tokens:.2f} against the same rows" if is_split else ""
        return ", ".join(filter(None, (f"{r} against whole chats" if is_split else r, best, rows)))


class ProgressLines:
    """Prints a line for each logged step, for the first and the last one, and after a validation.

    step 120/1500  loss 1.2340  r 7.9  tokens/s 12,345  lr 2.0e-05  grad_norm 1.32  eta 4:12

    At most one per second, so that a fast run does not fill the log.

    is_bar: instead show every step, and every step of a validation, in one line of the terminal, with a bar and the
        metrics that fit into it.
    is_shown: False shows nothing.
    """

    def __init__(self, is_bar: bool = False, is_shown: bool = True) -> None:
        self.is_bar, self.is_shown = is_bar, is_shown
        self.bar: tqdm[Any] | None = None
        self.last_line = self.started = 0.0
        self.first_step = 0

    def start(self, step: int) -> None:
        """Begin to measure the pace. step: optimizer steps taken before."""
        self.started, self.first_step = time.perf_counter(), step

    def took_step(self, step: int, total: int, metrics: Mapping[str, Any], is_logged: bool) -> None:
        """Show a step if it is its turn. step: its number. total: of the run; -1 if it has no end."""
        is_end, is_due = step in (self.first_step + 1, total), self.is_bar or is_logged
        if is_end or (is_due and self._is_time()):
            known = {name: (short, form) for name, (short, form) in SHOWN.items() if name in metrics}
            shown = [f"{short} {form.format(float(metrics[name]))}" for name, (short, form) in known.items()]
            self._show("step", step, total, shown, self._eta(step, total))

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print what a validation after this step has measured."""
        if metrics:
            self._say(f"step {step}", *(f"{name} {value:.4f}" for name, value in metrics.items()))

    def count(self, stage: str, done: int, total: int) -> None:
        """Show how much of an evaluation is done."""
        if done == total or self._is_time():
            self._show(stage, done, total)

    def close(self) -> None:
        """End the line of the bar, so that what is printed next has its own."""
        if self.bar is not None:
            self.bar.close()

    def _is_time(self) -> bool:
        return self.is_bar or time.perf_counter() - self.last_line >= SECONDS_BETWEEN_LINES

    def _eta(self, step: int, total: int) -> str:
        """Estimate the time for the remaining steps at the pace so far, validations included."""
        pace = (time.perf_counter() - self.started) / (step - self.first_step)
        return f"eta {tqdm.format_interval(round(pace * (total - step)))}" if total > step else ""

    def _show(self, stage: str, done: int, total: int, metrics: Sequence[str] = (), eta: str = "") -> None:
        count = f"{stage} {done}/{total}" if total > 0 else f"{stage} {done}"
        if not self.is_shown or not self.is_bar:
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
        if not self.is_shown or not ranks().is_first:
            return
        self.last_line = time.perf_counter()
        with tqdm.external_write_mode(file=sys.stderr):
            sys.stderr.write("  ".join(part for part in parts if part) + "\n")
        sys.stderr.flush()
