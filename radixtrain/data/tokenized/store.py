"""Samples in an Arrow file: written block by block, read through the page cache, never held in memory at once.

| column | type | |
|---|---|---|
| input_ids | list of int32 | |
| loss_spans | list of int32 | start and end of each run of labels that are the tokens themselves |
| labels | list of int32 | null if the spans say it all |
| loss_weights | list of float64 | null if all are 1 |
| where | string | file and line |
| is_first | bool | begins a conversation |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from radixtrain.collators.features import IGNORE_INDEX
from radixtrain.data.sample import Sample

BATCHES_IN_VIEW = 64
IDS, WEIGHTS = pa.list_(pa.int32()), pa.list_(pa.float64())
SCHEMA = pa.schema(
    {
        "input_ids": IDS,
        "loss_spans": IDS,
        "labels": IDS,
        "loss_weights": WEIGHTS,
        "where": pa.string(),
        "is_first": pa.bool_(),
    }
)

FILES = ("samples.arrow", "lengths.npy", "starts.npy", "batches.npy")
"""What a `TokenWriter` writes."""
LISTS = ("input_ids", "loss_spans", "labels", "loss_weights")


def packed(conversations: Iterable[Sequence[Sample]]) -> pa.RecordBatch:
    """The samples of some conversations as rows of the file. Conversations without a sample leave no trace."""
    rows = [(sample, not place) for samples in conversations for place, sample in enumerate(samples)]
    samples = [sample for sample, _ in rows]
    spans = [_loss_spans(sample) for sample in samples]
    labels = [sample.labels if known is None else None for sample, known in zip(samples, spans, strict=True)]
    columns = [
        _lists([sample.input_ids for sample in samples], IDS),
        _lists([() if known is None else known for known in spans], IDS),
        _lists(labels, IDS),
        _lists([sample.loss_weights for sample in samples], WEIGHTS),
        pa.array([sample.where for sample in samples], pa.string()),
        pa.array([is_first for _, is_first in rows], pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class TokenWriter:
    """Writes the `FILES` of a store into a folder.

    `close` returns a digest of tokens, labels, weights and conversations, which other samples do not have.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = pa.ipc.new_file(str(folder / "samples.arrow"), SCHEMA)
        self.lengths: list[np.ndarray] = []
        self.is_first: list[np.ndarray] = []
        self.batch_sizes: list[int] = []
        self.digest = xxhash.xxh3_128()

    def add(self, batch: pa.RecordBatch) -> None:
        """batch: from `packed`."""
        if not batch.num_rows:
            return
        self.file.write_batch(batch)
        self.batch_sizes.append(batch.num_rows)
        self.lengths.append(np.diff(batch["input_ids"].offsets.to_numpy()).astype(np.int64))
        self.is_first.append(batch["is_first"].to_numpy(zero_copy_only=False))
        for name in LISTS:
            column = batch[name]
            self.digest.update(np.diff(column.offsets.to_numpy()).tobytes())
            self.digest.update(column.values.to_numpy().tobytes())
        self.digest.update(self.is_first[-1].tobytes())

    def close(self) -> str:
        """Finish the files. Returns the digest."""
        self.file.close()
        is_first = np.concatenate([*self.is_first, np.ones(1, dtype=bool)])
        lengths = np.concatenate([*self.lengths, np.zeros(0, dtype=np.int64)])
        for name, values in (("lengths", lengths), ("starts", np.flatnonzero(is_first)), ("batches", self.batch_sizes)):
            np.save(self.folder / f"{name}.npy", np.asarray(values, dtype=np.int64))
        return self.digest.hexdigest()


class _Lists(NamedTuple):
    """A column of n lists without a copy.

    values: of all lists, back to back. offsets: (n + 1,). the first value of each list, and the end.
    is_null: (n,), bool.
    """

    values: np.ndarray
    offsets: np.ndarray
    is_null: np.ndarray

    @classmethod
    def of(cls, column: Any) -> _Lists:
        return cls(column.values.to_numpy(), column.offsets.to_numpy(), column.is_null().to_numpy(zero_copy_only=False))

    def entry(self, place: int) -> np.ndarray | None:
        return None if self.is_null[place] else self.values[self.offsets[place] : self.offsets[place + 1]]


class TokenStore(Sequence[list[Sample]]):
    """The conversations of a folder that a `TokenWriter` filled: `store[i]` is a list of samples.

    lengths: (num_samples,), int64. tokens of each sample.
    starts: (num_conversations + 1,), int64. the first sample of each conversation, and the end.

    owned: a temporary folder, which is removed together with the store.

    It travels to other processes as the name of its folder.
    """

    def __init__(self, folder: Path, owned: TemporaryDirectory[str] | None = None):
        self.folder = folder
        self.owned = owned

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "owned": None}

    def opened(self) -> TokenStore:
        """Itself, with every file open: it and the processes forked from this one can read on if the folder goes."""
        _ = self.lengths, self.starts, self._batch_ends, self._file
        return self

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        start, end = self.starts[index % len(self) : index % len(self) + 2].tolist()
        return [self.sample(number) for number in range(start, end)]

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.load(self.folder / "lengths.npy", mmap_mode="r")

    @cached_property
    def starts(self) -> np.ndarray:
        return np.load(self.folder / "starts.npy", mmap_mode="r")

    def has_several_answers(self) -> bool:
        """Whether a sample has labels in more than one run, of those whose labels are tokens of the sample."""
        batches = (self._file.get_batch(number)["loss_spans"] for number in range(self._file.num_record_batches))
        return any((np.diff(spans.offsets.to_numpy()) > 2).any() for spans in batches)

    @cached_property
    def about(self) -> dict[str, Any]:
        """What was written beside the samples."""
        return read_about(self.folder)

    @cached_property
    def _batch_ends(self) -> np.ndarray:
        return np.cumsum(np.load(self.folder / "batches.npy"))

    @cached_property
    def _file(self) -> pa.ipc.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self.folder / "samples.arrow")))

    @cached_property
    def _views(self) -> Any:
        return lru_cache(BATCHES_IN_VIEW)(self._views_of)

    def _views_of(self, number: int) -> dict[str, Any]:
        """The columns of one record batch."""
        batch = self._file.get_batch(number)
        return {**{name: _Lists.of(batch[name]) for name in LISTS}, "where": batch["where"]}

    def sample(self, number: int) -> Sample:
        """One of all, counted from 0."""
        batch = int(np.searchsorted(self._batch_ends, number, side="right"))
        place = number - (int(self._batch_ends[batch - 1]) if batch else 0)
        views = self._views(batch)
        ids, spans, labels, weights = (views[name].entry(place) for name in LISTS)
        ids = ids.astype(np.int64)
        return Sample(
            input_ids=ids,
            labels=_labels_in(spans, ids) if labels is None else labels.astype(np.int64),
            where=views["where"][place].as_py(),
            loss_weights=None if weights is None else weights.copy(),
        )


def _loss_spans(sample: Sample) -> np.ndarray | None:
    """Pairs of start and end, flat; None if a label is not the token at its place."""
    bears_loss = sample.labels != IGNORE_INDEX
    if not np.array_equal(sample.labels[bears_loss], sample.input_ids[bears_loss]):
        return None
    edges = np.diff(np.concatenate([[False], bears_loss, [False]]).astype(np.int8))
    return np.flatnonzero(edges)


def _labels_in(spans: np.ndarray, ids: np.ndarray) -> np.ndarray:
    labels = np.full_like(ids, IGNORE_INDEX)
    for start, end in spans.reshape(-1, 2).tolist():
        labels[start:end] = ids[start:end]
    return labels


def _lists(rows: Sequence[Any], kind: pa.ListType) -> pa.ListArray:
    """Rows as an Arrow column; None is null."""
    filled = [() if row is None else row for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in filled])]).astype(np.int32)
    dtype = kind.value_type.to_pandas_dtype()
    values = np.concatenate([np.zeros(0, dtype), *(np.asarray(row, dtype) for row in filled)])
    mask = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=mask)


ABOUT = "about.json"


def write_about(entry: Path, about: Mapping[str, Any]) -> None:
    """about: what JSON can hold."""
    text = json.dumps({**about, "checksum": _checksum(about)})
    (entry / ABOUT).write_text(text, encoding="utf-8")


def read_about(entry: Path) -> dict[str, Any]:
    """What was written. ValueError if the file was changed since, OSError if it cannot be read."""
    try:
        about = json.loads((entry / ABOUT).read_text(encoding="utf-8"))
        is_whole = about.pop("checksum", None) == _checksum(about)
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{ABOUT} is not as it was written")
    return about


def _checksum(about: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(about, sort_keys=True).encode())
