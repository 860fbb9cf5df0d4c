"""Token rows of a file: how one is read, the checks before training on it, and counts of what happened to the rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, LOSS_MASKS, WEIGHT_NAMES, TokenRow, read_token_row
from radixtrain.errors import DataError

LARGEST_WEIGHT = 3e38  # what float32 holds; a comparison with NaN is false


def sample_from_tokens(fields: dict[str, Any], where: str, completion_only_loss: bool = True) -> TokenRow:
    """Make a sample of a row's own token columns.

    fields: as `read_token_row` takes them, of JSON's types.
    where: file and line, for the error.
    completion_only_loss: whether `completion_mask` counts, as in TRL.

    Raises DataError as `read_token_row`, and for advantages, which are not part of this loss.
    """
    if "advantages" in fields:
        reason = "advantages: the loss here is a cross-entropy, which has none"
        raise DataError(where, f"{reason}; multiply it by loss_weights, or use RadixCollator in a loop of your own")
    of_loss = {"labels"} if "labels" in fields else set(LOSS_MASKS)
    if not completion_only_loss:
        of_loss -= {"completion_mask"}
    read = {"input_ids", *of_loss, *WEIGHT_NAMES, "attention_mask"}
    columns = {name: _plain(values, name, where) for name, values in fields.items() if name in read}
    return read_token_row(columns, where)


def check_vocabulary(sample: TokenRow, vocab_size: int) -> None:
    """Raise DataError at the first token id or label that is outside the vocabulary."""
    known = f"the vocabulary (0..{vocab_size - 1})"
    is_ignored = sample.labels == IGNORE_INDEX
    for what, ids, allowed, fault in (
        ("token id", sample.input_ids, False, f"outside {known}"),
        ("label", sample.labels, is_ignored, f"neither {IGNORE_INDEX} nor in {known}"),
    ):
        outside = ((ids < 0) | (ids >= vocab_size)) & ~np.asarray(allowed)
        if outside.any():
            position = int(outside.argmax())
            raise DataError(sample.where, f"{what} {ids[position]} at position {position} is {fault}")


def _plain(values: object, name: str, where: str) -> list[Any] | tuple[Any, ...]:
    """Return a column of Python numbers; NumPy would read text, and take a truth value for a number."""
    kinds: tuple[type, ...]
    limit: float
    what, kinds, limit = "integers", (int,), 2**63
    if name in WEIGHT_NAMES:
        what, kinds, limit = "numbers of float32", (int, float), LARGEST_WEIGHT
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(plain, list | tuple):
        raise DataError(where, f"{name}: expected a list of {what}, found {type(plain).__name__}")
    for position, value in enumerate(plain):
        if type(value) not in kinds or not -limit < value < limit:
            raise DataError(where, f"{name}: expected {what}, found {str(value)[:40]!r} at position {position}")
    return plain


NUM_SHOWN, NUM_NAMED = 5, 8


@dataclass
class EncodeReport:
    """Counts that `ChatEncoder.encode_all` adds to. `str()` is a line for people.

    num_bad_rows: that could not be used; `bad_rows` are what was wrong with the first few.
    num_samples: that are trained, the truncated ones among them.
    num_dropped_samples: longer than `max_length`, with `excess_length_strategy: drop`.
    num_truncated_samples, num_without_loss: cut to `max_length`; and those dropped because the cut took all their loss.
    num_long_samples, longest, longest_where: longer than `max_length`, whatever was done with them.
    num_tokens, num_labels: of the samples that are trained.
    num_with_system, num_without_system: chats that begin with a system turn, and the other chats.
    unused_columns: how many rows had each column, key of messages or last turns that nothing reads.
    """

    num_rows: int = 0
    num_bad_rows: int = 0
    num_samples: int = 0
    num_dropped_samples: int = 0
    num_truncated_samples: int = 0
    num_without_loss: int = 0
    num_long_samples: int = 0
    longest: int = 0
    longest_where: str = ""
    num_tokens: int = 0
    num_labels: int = 0
    num_with_system: int = 0
    num_without_system: int = 0
    bad_rows: list[str] = field(default_factory=list)
    unused_columns: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.unused_columns = Counter(self.unused_columns)  # JSON has read a dict

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

    def lines(self) -> list[str]:
        """List what was left out, for the log: a total and the first few."""
        if not self.num_bad_rows:
            return []
        shown = [f"  skipped {text}" for text in self.bad_rows]
        more = self.num_bad_rows - len(shown)
        return [f"skipped {self.num_bad_rows:,} bad rows:", *shown, *([f"  and {more:,} more"] if more else [])]

    def unread(self) -> str:
        """Name what nothing reads, with its number of rows; empty if all is read."""
        named = [f"{name} ({count:,} rows)" for name, count in self.unused_columns.most_common(NUM_NAMED)]
        more = len(self.unused_columns) - len(named)
        return ", ".join([*named, *([f"{more:,} others"] if more else [])])

    def __str__(self) -> str:
        counts = {
            "bad rows skipped": self.num_bad_rows,
            "samples dropped for their length": self.num_dropped_samples,
            "samples truncated": self.num_truncated_samples,
            "samples dropped because truncation left them no loss": self.num_without_loss,
        }
        rare = [f"{count:,} {what}" for what, count in counts.items() if count]
        return ", ".join([f"{self.num_rows:,} rows, {self.num_samples:,} samples", *rare])
