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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.text_files import read_text
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative

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


# Several sources, and which turns are trained


@dataclass(frozen=True, kw_only=True)
class Part:
    """The conversations of one source.

    weight: how often each occurs in an epoch, on average.
    digest: of its samples.
    """

    name: str
    conversations: Any
    weight: float = 1.0
    digest: str = ""


class Corpus(Sequence[list[TokenRow]]):
    """Conversations by index: `corpus[i]` is a list of samples.

    parts: the sources, one after the other.
    chosen: indices into them, in the order of this corpus; None for all.

    lengths: (num_samples,), int64. tokens of each sample.
    """

    def __init__(self, parts: Sequence[Part], chosen: IntArray | None = None):
        self.parts = tuple(parts)
        self.chosen = chosen
        self.bounds = cumulative(np.array([len(part.conversations) for part in parts]))

    def __len__(self) -> int:
        return int(self.bounds[-1]) if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        place = index if self.chosen is None else int(self.chosen[index])
        part = int(np.searchsorted(self.bounds, place, side="right")) - 1
        return self.parts[part].conversations[place - int(self.bounds[part])]

    def select(self, indices: IntArray) -> Corpus:
        """Select some of the conversations, in this order."""
        return Corpus(self.parts, indices if self.chosen is None else self.chosen[indices])

    @property
    def weights(self) -> np.ndarray | None:
        """Return how often each conversation occurs in an epoch, (num_conversations,), float64; None if once."""
        if all(part.weight == 1 for part in self.parts):
            return None
        weights = np.repeat([part.weight for part in self.parts], np.diff(self.bounds))
        return weights if self.chosen is None else weights[self.chosen]

    @cached_property
    def lengths(self) -> IntArray:
        lengths = np.concatenate([part.conversations.lengths for part in self.parts])
        if self.chosen is None:
            return lengths
        sizes = np.concatenate([np.diff(part.conversations.starts) for part in self.parts])
        return lengths[concatenate_ranges(cumulative(sizes)[self.chosen], sizes[self.chosen])]

    @property
    def digest(self) -> str:
        """Return a digest that distinguishes these conversations, in this order, from others."""
        digest = xxhash.xxh3_128(" ".join(f"{part.digest} {part.weight!r}" for part in self.parts).encode())
        if self.chosen is not None:
            digest.update(self.chosen.astype(np.int64).tobytes())
        return digest.hexdigest()


def last_turns(store: TokenStore) -> np.ndarray:
    """Mark the last sample of each conversation, (num_samples,), bool."""
    is_last = np.zeros(len(store.lengths), dtype=bool)
    is_last[store.starts[1:] - 1] = True
    return is_last


def distinct_turns(store: TokenStore) -> np.ndarray:
    """Mark every turn once, (num_samples,), bool, in the conversation that has most turns.

    Samples of turns are one turn if their tokens, labels and weights are the same. Rows that are equal as a whole stay,
    as often as they occur; so do all whole chats.
    """
    if len(store) == len(store.lengths):
        return np.ones(len(store), dtype=bool)
    sizes = np.diff(store.starts)
    trained_in: dict[bytes, tuple[bytes, ...]] = {}
    is_chosen = np.zeros(len(store.lengths), dtype=bool)
    for place in np.argsort(-sizes, kind="stable"):
        row = tuple(_key(sample) for sample in store[place])
        first = store.starts[place]
        is_chosen[first : first + len(row)] = [trained_in.setdefault(key, row) == row for key in row]
    return is_chosen


def _key(sample: TokenRow) -> bytes:
    digest = xxhash.xxh3_128(sample.input_ids.tobytes())
    digest.update(sample.labels.tobytes())
    if sample.loss_weights is not None:
        digest.update(sample.loss_weights.tobytes())
    return digest.digest()
