"""Samples in an Arrow file: written block by block, read through the page cache, never held in memory at once.

| column | type | |
|---|---|---|
| input_ids | list of int32 | |
| loss_spans | list of int32 | start and end of each run of labels that are the tokens themselves |
| labels | list of int32 | null if the spans say it all |
| loss_weights | list of float32 | null if all are 1 |
| where | string | file and line |
| is_first | bool | begins a conversation |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.text_files import read_text

IDS, WEIGHTS = pa.list_(pa.int32()), pa.list_(pa.float32())
LISTS = {"input_ids": IDS, "loss_spans": IDS, "labels": IDS, "loss_weights": WEIGHTS}
SCHEMA = pa.schema({**LISTS, "where": pa.string(), "is_first": pa.bool_()})
SAMPLES, ABOUT = "samples.arrow", "about.json"


def packed(conversations: Iterable[Sequence[TokenRow]]) -> pa.RecordBatch:
    """Pack the samples of some conversations as rows of the file. Conversations without a sample leave no trace."""
    rows = [_row(sample, not place) for samples in conversations for place, sample in enumerate(samples)]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _row(sample: TokenRow, is_first: bool) -> dict[str, Any]:
    spans = _loss_spans(sample)
    return {
        "input_ids": sample.input_ids.astype(np.int32),  # int64 takes 70 times as long to convert
        "loss_spans": () if spans is None else spans.astype(np.int32),
        "labels": sample.labels.astype(np.int32) if spans is None else None,
        "loss_weights": sample.loss_weights,
        "where": sample.where,
        "is_first": is_first,
    }


class TokenWriter:
    """Writes the file of a store into a folder.

    `close` returns a digest of tokens, labels, weights and conversations, which differs for other samples.
    """

    def __init__(self, folder: Path):
        self.file = pa.ipc.new_file(str(folder / SAMPLES), SCHEMA)
        self.digest = xxhash.xxh3_128()

    def add(self, batch: pa.RecordBatch) -> None:
        """Write a batch from `packed`."""
        if not batch.num_rows:
            return
        self.file.write_batch(batch)
        for name in LISTS:
            column = batch[name]
            self.digest.update(np.diff(column.offsets.to_numpy()).tobytes())
            self.digest.update(column.values.to_numpy().tobytes())
        self.digest.update(batch["is_first"].to_numpy(zero_copy_only=False).tobytes())

    def close(self) -> str:
        """Finish the file and return the digest."""
        self.file.close()
        return self.digest.hexdigest()


class TokenStore(Sequence[list[TokenRow]]):
    """The conversations of a folder that a `TokenWriter` filled: `store[i]` is a list of samples.

    lengths: (num_samples,), int64. tokens of each sample.
    starts: (num_conversations + 1,), int64. the first sample of each conversation, and the end.

    numbers: (num_samples,), int64. which samples of the file these are; None for all. Conversations without any are
        left out.

    It is pickled as the name of its folder.
    """

    def __init__(self, folder: Path, numbers: np.ndarray | None = None):
        self.folder, self.numbers = folder, numbers

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "numbers": self.numbers}

    def opened(self) -> TokenStore:
        """Open the file and return the store; this process and its forks can read on if the folder goes."""
        _ = self.lengths, self.starts
        return self

    def select(self, is_chosen: np.ndarray) -> TokenStore:
        """Select some of the samples, grouped by conversation as here. is_chosen: (num_samples,), bool."""
        chosen = np.flatnonzero(is_chosen)
        numbers = chosen if self.numbers is None else self.numbers[chosen]
        return TokenStore(self.folder, numbers).opened()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        return [self.sample(number) for number in range(self.starts[index], self.starts[index + 1])]

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths = pc.list_value_length(self._columns["input_ids"]).to_numpy().astype(np.int64)
        return lengths if self.numbers is None else lengths[self.numbers]

    @cached_property
    def starts(self) -> np.ndarray:
        conversations = np.cumsum(self._columns["is_first"].to_numpy())
        if self.numbers is not None:
            conversations = conversations[self.numbers]
        return np.append(np.flatnonzero(np.diff(conversations, prepend=0)), len(conversations))

    def has_several_answers(self) -> bool:
        """Return whether a sample has several runs of labels, among those whose labels are tokens of the sample."""
        return bool((pc.list_value_length(self._columns["loss_spans"]).to_numpy() > 2).any())

    @cached_property
    def about(self) -> dict[str, Any]:
        """Return what was written beside the samples."""
        about: dict[str, Any] = json.loads(read_text(self.folder / ABOUT))
        return about

    @cached_property
    def _columns(self) -> dict[str, pa.ChunkedArray]:
        table = pa.ipc.open_file(pa.memory_map(str(self.folder / SAMPLES))).read_all()
        return dict(zip(table.column_names, table.columns, strict=True))

    def sample(self, number: int) -> TokenRow:
        """Return one of all samples, counted from 0."""
        place = number if self.numbers is None else int(self.numbers[number])
        row = {name: column[place] for name, column in self._columns.items()}
        ids, spans, labels, weights = (row[name].values for name in LISTS)
        input_ids = ids.to_numpy().astype(np.int64)
        if labels is None:
            labels = _labels_in(spans, input_ids)
        return TokenRow(
            input_ids=input_ids,
            labels=np.asarray(labels, dtype=np.int64),
            where=row["where"].as_py(),
            loss_weights=None if weights is None else np.array(weights),
        )


def _loss_spans(sample: TokenRow) -> np.ndarray | None:
    """Return the start and end of each run of labels, flat; None if a label is not the token at its place."""
    bears_loss = sample.labels != IGNORE_INDEX
    if not np.array_equal(sample.labels[bears_loss], sample.input_ids[bears_loss]):
        return None
    edges = np.diff(np.concatenate([[False], bears_loss, [False]]).astype(np.int8))
    return np.flatnonzero(edges)


def _labels_in(spans: pa.Array, ids: np.ndarray) -> np.ndarray:
    labels = np.full_like(ids, IGNORE_INDEX)
    for start, end in spans.to_numpy().reshape(-1, 2).tolist():
        labels[start:end] = ids[start:end]
    return labels


def write_about(entry: Path, about: Mapping[str, Any]) -> None:
    """Write what a store's `about` returns. about: what JSON can hold."""
    (entry / ABOUT).write_text(json.dumps(about), encoding="utf-8")
