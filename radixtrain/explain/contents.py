"""The contents of a report: numbers, and texts made of them, which the terminal and the page show alike."""

from __future__ import annotations

from dataclasses import dataclass

from radixtrain.errors import bytes_text
from radixtrain.explain.breaks import Break
from radixtrain.explain.sharing import Draw
from radixtrain.explain.tree import TextTree

MINUTE, HOUR = 60, 3600


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The predicted effect of a run with these settings.

    r: tokens of the rows per computed token; of whole chats, if chats are split into their turns. rows_r: then that of
        the turns, each with all before it. best_r: r if every step were one micro-batch.
    speedup: predicted, of a training step, against an ordinary padded one of whole chats on this machine.
    seconds_per_epoch: predicted. memory_bytes: predicted peak of a step, weights and optimizer included.
    """

    draw: Draw
    r: float
    best_r: float
    rows_r: float | None = None
    speedup: float | None = None
    seconds_per_epoch: float | None = None
    memory_bytes: int | None = None

    def __str__(self) -> str:
        grouped = ", group_by_prefix" if self.draw.group_by_prefix else ""
        return f"batch_size {self.draw.batch_size:,}, max_tokens {self.draw.max_tokens:,}{grouped}"

    @property
    def cells(self) -> tuple[str, ...]:
        """Return a row of the table: its numbers, a dash for what was not predicted."""
        time, memory = self.seconds_per_epoch, self.memory_bytes
        return (
            f"{self.draw.batch_size:,}",
            f"{self.draw.max_tokens:,}",
            "grouped" if self.draw.group_by_prefix else "shuffled",
            ratio(self.r),
            ratio(self.best_r),
            "–" if self.speedup is None else f"{ratio(self.speedup)}x",
            "–" if time is None else duration(time),
            "–" if memory is None else bytes_text(memory),
        )


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Everything that `radixtrain report` found.

    heading: in few words. summary: sentences about an epoch. facts: of the rows, name to text.
    tree: of the sequences, or of a sample, which tree_sample says.
    settings: those of the user, and others that share more or less. command: to paste.
    hints: sentences: what would save more. notes: sentences: what was not predicted and why, what is estimated.
    environment: machine and versions, for the foot of the page.
    """

    title: str
    model: str
    heading: str
    summary: tuple[str, ...]
    facts: dict[str, str]
    tree: TextTree
    tree_sample: str
    settings: tuple[Setting, ...]
    command: str
    breaks: tuple[Break, ...]
    hints: tuple[str, ...]
    notes: tuple[str, ...]
    environment: dict[str, str]


def ratio(value: float) -> str:
    """Format three digits without an exponent: `1.84`, `21`, `19.9`, `1,250`."""
    digits = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return digits if "." not in digits else digits.rstrip("0").rstrip(".")


def rounded(value: float) -> str:
    """Format an estimated count with three significant digits: `349,000`; an integer below 1,000 stays exact."""
    return f"{round(float(f'{value:.3g}')):,}"


def duration(seconds: float) -> str:
    """Format seconds: `< 1 s`, `1.4 s`, `45 s`, `12 min 5 s`, `3 h 20 min`, `30 h`."""
    if seconds < 1:
        return "< 1 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < HOUR - 0.5:
        large, small, names = *divmod(round(seconds), MINUTE), ("min", "s")
    else:
        large, small, names = *divmod(round(seconds / MINUTE), 60), ("h", "min")
    parts = [f"{number:,} {name}" for number, name in zip((large, small), names, strict=True) if number]
    return " ".join(parts)
