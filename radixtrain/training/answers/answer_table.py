"""The answers of an evaluation as a table: a CSV file that is written whole or not at all, and one for wandb."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.loggers import WandbLogger

from radixtrain.checkpoints.atomic import writing_file

__all__ = ["Judged", "log_table", "write_table"]

MOST_ROWS_LOGGED = 1_000  # wandb uploads a whole table at every validation


class Judged(NamedTuple):
    """A row of the table, and its columns.

    row: file and line. prompt: all that the model read, with special tokens. answer, target: without them.
    score: by the metric. finish_reason: `stop`, or `length` for an answer that `max_new_tokens` cut.
    """

    row: str
    prompt: str
    answer: str
    target: str
    score: float
    finish_reason: str


def write_table(path: Path, rows: Sequence[Judged]) -> None:
    """Write or replace the file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([Judged._fields, *rows])


def log_table(loggers: Iterable[Any], name: str, rows: Sequence[Judged]) -> None:
    """Hand the first rows to every `WandbLogger` among the loggers."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(name, columns=list(Judged._fields), data=[list(row) for row in rows[:MOST_ROWS_LOGGED]])
