"""What became of the rows of a file, for the log and for the error when none of them can be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from radixtrain.errors import DataError

__all__ = ["EncodeReport"]

NUM_SHOWN = 5


@dataclass
class EncodeReport:
    """Counts that `ChatEncoder.encode_all` adds to. `str()` is a line for people.

    num_bad_rows: that could not be used; `bad_rows` are what was wrong with the first few.
    num_dropped_rows: left without a sample, because all of them were dropped for their length.
    num_samples: kept, the truncated ones among them.
    num_dropped_samples: longer than `max_length`, with `excess_length_strategy: drop`.
    num_truncated_samples, num_without_loss: cut to `max_length`; and those dropped because the cut took all their loss.
    num_long_samples, longest, longest_where: longer than `max_length`, whatever was done with them.
    num_tokens, num_labels: of the samples that were kept.
    unused_columns: how many rows had each column that nothing reads.
    """

    num_rows: int = 0
    num_bad_rows: int = 0
    num_dropped_rows: int = 0
    num_samples: int = 0
    num_dropped_samples: int = 0
    num_truncated_samples: int = 0
    num_without_loss: int = 0
    num_long_samples: int = 0
    longest: int = 0
    longest_where: str = ""
    num_tokens: int = 0
    num_labels: int = 0
    bad_rows: list[str] = field(default_factory=list)
    unused_columns: Counter[str] = field(default_factory=Counter)

    def add_bad_row(self, error: DataError) -> None:
        self.num_bad_rows += 1
        self.bad_rows = [*self.bad_rows, str(error)][:NUM_SHOWN]

    def add_long_sample(self, num_tokens: int, where: str) -> None:
        self.num_long_samples += 1
        if num_tokens > self.longest:
            self.longest, self.longest_where = num_tokens, where

    def add(self, other: EncodeReport) -> None:
        """Count the rows of another report, which come after these."""
        if other.longest > self.longest:
            self.longest, self.longest_where = other.longest, other.longest_where
        self.bad_rows = [*self.bad_rows, *other.bad_rows][:NUM_SHOWN]
        self.unused_columns += other.unused_columns
        for name, value in vars(other).items():
            if name.startswith("num_"):
                setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "unused_columns": dict(self.unused_columns)}

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> EncodeReport:
        return cls(**{**values, "unused_columns": Counter(values["unused_columns"])})

    def lines(self) -> list[str]:
        """What was left out, for the log: a total and the first few."""
        if not self.num_bad_rows:
            return []
        shown = [f"  skipped {text}" for text in self.bad_rows]
        more = self.num_bad_rows - len(shown)
        return [f"skipped {self.num_bad_rows:,} bad rows:", *shown, *([f"  and {more:,} more"] if more else [])]

    def __str__(self) -> str:
        counts = {
            "bad rows skipped": self.num_bad_rows,
            "samples dropped for their length": self.num_dropped_samples,
            "samples truncated": self.num_truncated_samples,
            "samples dropped because truncation left them no loss": self.num_without_loss,
        }
        rare = [f"{count:,} {what}" for what, count in counts.items() if count]
        return ", ".join([f"{self.num_rows:,} rows, {self.num_samples:,} samples", *rare])
