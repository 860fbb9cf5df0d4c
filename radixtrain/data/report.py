"""What became of the rows of a file, for the log and for the error when none of them can be used."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EncodeReport"]


@dataclass
class EncodeReport:
    """Counts that `ChatEncoder.encode_all` adds to. `str()` is a line for people.

    num_bad_rows: given to `on_error`.
    num_dropped_rows: left without a sample, because `excess_length_strategy: drop` took all of them.
    num_samples: kept, the truncated ones among them.
    """

    num_rows: int = 0
    num_bad_rows: int = 0
    num_dropped_rows: int = 0
    num_samples: int = 0
    num_dropped_samples: int = 0
    num_truncated_samples: int = 0

    def __str__(self) -> str:
        counts = {
            "bad rows skipped": self.num_bad_rows,
            "samples dropped for their length": self.num_dropped_samples,
            "samples truncated": self.num_truncated_samples,
        }
        rare = [f"{count} {what}" for what, count in counts.items() if count]
        return ", ".join([f"{self.num_rows} rows, {self.num_samples} samples", *rare])
