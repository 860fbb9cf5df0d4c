"""How far tokenising is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress"]

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(name: str, num_rows: int | None) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes the rows and the tokens done so far.

    name: what is tokenised. num_rows: of all, None if that is not known.
    """
    if sys.stderr.isatty():
        with _bar(name, num_rows) as update:
            yield update
    else:
        yield _Lines(name, num_rows)


@contextmanager
def _bar(name: str, num_rows: int | None) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("tokenising {task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} rows, {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=num_rows, rate="")

        def update(rows: int, tokens: int) -> None:
            rate = tokens / (time.perf_counter() - start)
            bar.update(task, completed=rows, rate=f"{rate:,.0f} tokens/s")

        yield update


class _Lines:
    def __init__(self, name: str, num_rows: int | None):
        self.name, self.num_rows = name, num_rows
        self.start = self.last = time.perf_counter()

    def __call__(self, rows: int, tokens: int) -> None:
        now = time.perf_counter()
        if now - self.last < SECONDS_BETWEEN_LINES:
            return
        self.last = now
        of_all = f" of {self.num_rows:,}" if self.num_rows else ""
        rate = tokens / (now - self.start)
        logger.info("tokenising %s: %s%s rows, %s tokens/s", self.name, f"{rows:,}", of_all, f"{rate:,.0f}")
