"""One micro-batch of a training run: its sequences, and their prefix tree as runs of rows without a branch.

The tree is read from the arrays that the model receives.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radixtrain.collators.steps import Step
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import features_of, whole_chats
from radixtrain.errors import UserError
from radixtrain.inspection.tokens import Token, token_texts
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.radix_inputs import layout_of, radix_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CONTEXT = 16  # tokens before a run to decode with it: a character may begin there, and blanks depend on it
MOST_NAMES = 3


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What the model receives at once, and its source.

    place: its number and the optimizer step of the first epoch, counted from 0, in words.
    samples: its sequences, in the order of `cu_seqlens`.
    batch: as `RadixCollator` makes it for radixtrain's own loss.
    num_step_labels: labelled tokens of the whole step, by which its loss is divided.
    num_whole_tokens: tokens of its chats, each up to the end of its last turn here; T if no chat is split into turns.
    """

    place: str
    samples: Sequence[TokenRow]
    batch: dict[str, Any]
    num_step_labels: int
    num_whole_tokens: int

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return int(layout_of(self.batch).inverse_indices.numel())

    @property
    def num_padding(self) -> int:
        return int(self.batch["input_ids"].numel()) - self.num_unique_tokens

    @property
    def num_unique_tokens(self) -> int:
        """Return U, without padding."""
        return int(torch.unique(layout_of(self.batch).inverse_indices).numel())

    @property
    def num_labels(self) -> int:
        """Count labelled tokens, each once for every sequence that learns it."""
        radix = radix_of(self.batch)
        return int(radix.loss_weights.sum()) if radix.label_indices is None else len(radix.loss_weights)


def named_rows(wheres: Iterable[str]) -> str:
    """Name rows: `chats.jsonl:3, chats.jsonl:5 (2 samples) and 4 more`, without folders."""
    counted = Counter(os.path.basename(where) for where in wheres)
    names = [f"{name} ({count} samples)" if count > 1 else name for name, count in counted.items()]
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def micro_batches(data: StepData, step: int) -> list[MicroBatch]:
    """Collate all micro-batches of an optimizer step of the first epoch, as training does.

    data: after its `setup("inspect")`.
    step: from 0.

    Raises UserError if there is no such step, and with `dedup: false`, whose batches share nothing.
    """
    if not data.settings.dedup:
        raise UserError("inspect shows what a batch shares, which is nothing with dedup: false; leave that out")
    steps = data.train_steps()
    if not 0 <= step < len(steps):
        raise UserError(f"step: an epoch has the steps 0 to {len(steps) - 1}, got {step}")
    conversations = [data.conversations["train"][index] for index in steps[step]]
    samples = [sample for conversation in conversations for sample in conversation]
    chat_of = [chat for chat, conversation in enumerate(conversations) for _ in conversation]
    collated: Step = data.step_collator()(features_of(samples))
    parts = zip(collated.members, collated.micro_batches, strict=True)
    return [
        MicroBatch(
            place=f"step {step} of {len(steps)}, micro-batch {index} of {len(collated.members)}",
            samples=[samples[member] for member in members],
            batch=batch,
            num_step_labels=collated.num_labels,
            num_whole_tokens=sum(
                length
                for _, turns in groupby(sorted(members), chat_of.__getitem__)
                for length, _ in whole_chats([samples[turn] for turn in turns])
            ),
        )
        for index, (members, batch) in enumerate(parts)
    ]


@dataclass(frozen=True)
class Prediction:
    """A token that the loss trains a row to predict: its text, and the weight of its cross-entropy."""

    row: int
    text: str
    weight: float


@dataclass(frozen=True)
class Run:
    """Rows that the same sequences pass through, up to where one ends or they diverge.

    rows: of the batch, first and one past the last.
    tokens: one for each row. Its weight is the sum over the sequences that learn it.
    sequences: all that pass through, by their index in the micro-batch. ends: those whose last token is the last row.
    predictions: of the last row.
    children: indices of the runs that follow, in the order of the rows.
    """

    rows: tuple[int, int]
    tokens: list[Token]
    sequences: list[int]
    ends: list[int]
    predictions: list[Prediction]
    children: list[int]


@dataclass(frozen=True)
class RunTree:
    """The runs of a micro-batch.

    runs: in the order of the rows. roots: indices of those that nothing precedes. strays: predictions of a token that
    comes next in no sequence, because a row has labels of its own.
    """

    runs: list[Run]
    roots: list[int]
    strays: list[Prediction]


def run_tree(part: MicroBatch, tokenizer: PreTrainedTokenizerBase) -> RunTree:
    """Build the tree of a micro-batch, with text and weights."""
    paths, ids = paths_of(part), part.batch["input_ids"][0].numpy()
    num_rows = max(int(path[-1]) for path in paths) + 1 if paths else 0
    parents = np.full(num_rows, -1)
    for path in paths:
        parents[path[1:]] = path[:-1]
    predicted = _predictions(part, tokenizer)
    by_predictor = defaultdict(list)
    for one in predicted.values():
        by_predictor[one.row].append(one)
    learned = {(one.row, token): one.weight for (_, token), one in predicted.items()}
    tokens = _row_tokens(paths, ids, parents, learned, tokenizer)
    starts = _run_starts(parents, [int(path[-1]) for path in paths])
    run_of = starts.searchsorted(np.arange(num_rows), side="right") - 1
    sequences, ends = _passing(paths, run_of)
    children = defaultdict(list)
    for run, start in enumerate(starts.tolist()):
        children[int(run_of[parents[start]]) if parents[start] >= 0 else -1].append(run)
    runs = [
        Run((first, last), tokens[first:last], sequences[run], ends[run], by_predictor[last - 1], children[run])
        for run, (first, last) in enumerate(pairwise([*starts.tolist(), num_rows]))
    ]
    found = set(zip(parents.tolist(), ids[:num_rows].tolist(), strict=True))
    return RunTree(runs, children[-1], [one for key, one in predicted.items() if key not in found])


def paths_of(part: MicroBatch) -> list[IntArray]:
    """Return the rows of each sequence, in the order of its tokens."""
    rows, bounds = layout_of(part.batch).inverse_indices.numpy(), radix_of(part.batch).cu_seqlens.tolist()
    return [rows[start:end] for start, end in pairwise(bounds)]


def _passing(paths: list[IntArray], run_of: IntArray) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the sequences that pass through each run, and those that end in it, by index. run_of: of each row."""
    sequences, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, path in enumerate(paths):
        ends[int(run_of[path[-1]])].append(number)
        for run in np.unique(run_of[path]).tolist():
            sequences[run].append(number)
    return sequences, ends


def _run_starts(parents: IntArray, last_rows: list[int]) -> IntArray:
    """Mark where runs begin: at a root, where its row does not follow the row before, or after a branch or an end."""
    num_rows = len(parents)
    num_children = np.bincount(parents[parents >= 0], minlength=num_rows)
    stops = num_children > 1
    stops[last_rows] = True
    is_start = parents != np.arange(num_rows) - 1
    is_start[1:] |= stops[:-1]
    is_start[:1] = True
    return np.flatnonzero(is_start)


def _predictions(part: MicroBatch, tokenizer: PreTrainedTokenizerBase) -> dict[tuple[int, int], Prediction]:
    """Group predictions by predicting row and label, and sum their weights."""
    radix, labels = radix_of(part.batch), part.batch["shift_labels"][0].tolist()
    rows = radix.predictor_indices[radix.prediction_rows].tolist()
    weights: dict[tuple[int, int], float] = defaultdict(float)
    for row, label, weight in zip(rows, labels, radix.loss_weights.tolist(), strict=True):
        weights[row, label] += weight
    texts = {label: token_texts([label], tokenizer)[0] for label in labels}
    return {(row, label): Prediction(row, texts[label], each) for (row, label), each in weights.items()}


def _row_tokens(
    paths: list[IntArray],
    ids: IntArray,
    parents: IntArray,
    learned: dict[tuple[int, int], float],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Token]:
    """Make a token for each row, decoded on the first path that reaches it."""
    texts: list[str | None] = [None] * len(parents)
    for path in paths:
        known = sum(texts[row] is not None for row in path.tolist())
        start = max(0, known - CONTEXT)
        decoded = token_texts(ids[path[start:]], tokenizer)
        for row, text in zip(path[known:].tolist(), decoded[known - start :], strict=True):
            texts[row] = text
    special = set(tokenizer.all_special_ids)
    return [
        Token(text or "", (parent, token) in learned, token in special, learned.get((parent, token), 1.0))
        for text, parent, token in zip(texts, parents.tolist(), ids[: len(parents)].tolist(), strict=True)
    ]
