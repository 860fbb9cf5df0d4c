"""A token sequence with labels, the checks before training on it, and counts of what became of the rows of a file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixtrain.collators.features import IGNORE_INDEX
from radixtrain.errors import DataError

LARGEST_WEIGHT = 3e38  # what float32 holds; a comparison with NaN is false
WEIGHT_NAMES = ("loss_weights", "weights")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence to train on.

    input_ids: (L,), int64. token ids.
    labels: (L,), int64. `labels[t]` is the target at position t, predicted from t - 1; -100 bears no loss.
    where: file and line of the row it came from.
    loss_weights: (L,), float64. factors of the labels' cross-entropies; None if all are 1.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    where: str
    loss_weights: np.ndarray | None = None

    @property
    def num_labels(self) -> int:
        """Tokens that bear loss. The first one is never predicted, so its label does not count."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))

    def part(self, start: int, end: int) -> Sample:
        """Its tokens from `start` to `end`."""
        weights = None if self.loss_weights is None else self.loss_weights[start:end]
        return Sample(self.input_ids[start:end], self.labels[start:end], self.where, weights)


def sample_from_tokens(fields: dict[str, Any], where: str, completion_only_loss: bool = True) -> Sample:
    """A sample from a row's own token columns.

    fields: `input_ids`, and `labels`; or else `assistant_masks`, `mask` and `completion_mask`, 1 for a token that bears
        loss. Without any of these all tokens bear loss. `loss_weights`, or `weights`, multiply the loss of each token.
        Tokens at the ends whose `attention_mask` is 0 are padding, and are left out.
    where: file and line, for the error.
    completion_only_loss: whether `completion_mask` counts, as in TRL.

    Raises DataError if a column is not a list of integers (of finite numbers, for weights) or differs in length from
    `input_ids`, or a mask is not 0 and 1, and for advantages, which are not part of this loss.
    """
    sample = _whole_sample(fields, where, completion_only_loss)
    if "attention_mask" not in fields:
        return sample
    attended = np.flatnonzero(_mask(fields, "attention_mask", where, len(sample.input_ids)))
    start, end = (int(attended[0]), int(attended[-1]) + 1) if len(attended) else (0, 0)
    if len(attended) < end - start:
        raise DataError(where, "attention_mask: has a 0 between two 1s; expected zeros only at the ends, for padding")
    return sample.part(start, end)


def _whole_sample(fields: dict[str, Any], where: str, completion_only_loss: bool) -> Sample:
    """With its padding."""
    input_ids = _integers(fields, "input_ids", where)
    weights = _weights(fields, where, len(input_ids))
    if "labels" in fields:
        return Sample(input_ids, _integers(fields, "labels", where, len(input_ids)), where, weights)
    names = ["assistant_masks", "mask", *(["completion_mask"] if completion_only_loss else [])]
    labels = input_ids.copy()
    for name in names:
        if name in fields:
            labels[~_mask(fields, name, where, len(input_ids))] = IGNORE_INDEX
    return Sample(input_ids, labels, where, weights)


def check_vocabulary(sample: Sample, vocab_size: int) -> None:
    """Raises DataError at the first token id or label that is outside the vocabulary."""
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


class TooLongError(DataError):
    """A sample is longer than `max_length`, and is neither to be dropped nor cut."""


def _mask(fields: dict[str, Any], name: str, where: str, length: int) -> np.ndarray:
    mask = _integers(fields, name, where, length)
    if ((mask != 0) & (mask != 1)).any():
        position = int(((mask != 0) & (mask != 1)).argmax())
        raise DataError(where, f"{name}: expected 0 or 1, found {mask[position]} at position {position}")
    return mask == 1


def _weights(fields: dict[str, Any], where: str, length: int) -> np.ndarray | None:
    if "advantages" in fields:
        reason = "advantages: the loss here is a cross-entropy, which has none"
        raise DataError(where, f"{reason}; multiply it by loss_weights, or use RadixCollator in a loop of your own")
    names = [name for name in WEIGHT_NAMES if name in fields]
    if len(names) > 1:
        raise DataError(where, "loss_weights and weights are two names of one column; remove one")
    if not names:
        return None
    values = fields[names[0]].tolist() if isinstance(fields[names[0]], np.ndarray) else fields[names[0]]
    if not isinstance(values, list | tuple) or len(values) != length:
        found = f"{len(values)}" if isinstance(values, list | tuple) else type(values).__name__
        raise DataError(where, f"{names[0]}: expected {length} values, one for each token, found {found}")
    for position, value in enumerate(values):
        if type(value) not in (int, float) or not abs(value) < LARGEST_WEIGHT:
            raise DataError(
                where, f"{names[0]}: expected numbers of float32, found {str(value)[:40]!r} at position {position}"
            )
    return np.array(values, dtype=np.float64)


def _integers(fields: dict[str, Any], name: str, where: str, length: int | None = None) -> np.ndarray:
    values = fields[name].tolist() if isinstance(fields[name], np.ndarray) else fields[name]
    if not isinstance(values, list | tuple):
        raise DataError(where, f"{name}: expected a list of integers, found {type(values).__name__}")
    if length is not None and len(values) != length:
        raise DataError(where, f"{name}: expected {length} values, as many as input_ids, found {len(values)}")
    for position, value in enumerate(values):
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise DataError(where, f"{name}: expected integers, found {str(value)[:40]!r} at position {position}")
    return np.array(values, dtype=np.int64)


def check_unweighted(fields: dict[str, Any], where: str) -> None:
    """Refuse weights and advantages of tokens that are not known here, so that they are not ignored."""
    for name in (*WEIGHT_NAMES, "advantages"):
        value = fields.get(name)
        if isinstance(value, list | tuple | np.ndarray) or (name == "loss_weights" and value is not None):
            raise DataError(where, f"{name}: only rows with input_ids or token_ids have them, one for each token")


NUM_SHOWN = 5


@dataclass
class EncodeReport:
    """Counts that `ChatEncoder.encode_all` adds to. `str()` is a line for people.

    num_bad_rows: that could not be used; `bad_rows` are what was wrong with the first few.
    num_dropped_rows: left without a sample: all of them were dropped for their length, or the row trains nothing.
    num_samples: kept, the truncated ones among them.
    num_dropped_samples: longer than `max_length`, with `excess_length_strategy: drop`.
    num_truncated_samples, num_without_loss: cut to `max_length`; and those dropped because the cut took all their loss.
    num_long_samples, longest, longest_where: longer than `max_length`, whatever was done with them.
    num_tokens, num_labels: of the samples that were kept.
    num_own_system: with another system turn than the `system_prompt` of the configuration.
    num_filled: from a table that had put nulls into their tools or arguments, which are left out.
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
    num_own_system: int = 0
    num_filled: int = 0
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
        """What was left out, for the log: a total and the first few."""
        if not self.num_bad_rows:
            return []
        shown = [f"  skipped {text}" for text in self.bad_rows]
        more = self.num_bad_rows - len(shown)
        return [f"skipped {self.num_bad_rows:,} bad rows:", *shown, *([f"  and {more:,} more"] if more else [])]

    def __str__(self) -> str:
        counts = {
            "bad rows skipped": self.num_bad_rows,
            "rows keep a system turn of their own": self.num_own_system,
            "rows without the nulls that their table had put into tools or arguments": self.num_filled,
            "samples dropped for their length": self.num_dropped_samples,
            "samples truncated": self.num_truncated_samples,
            "samples dropped because truncation left them no loss": self.num_without_loss,
        }
        rare = [f"{count:,} {what}" for what, count in counts.items() if count]
        return ", ".join([f"{self.num_rows:,} rows, {self.num_samples:,} samples", *rare])
