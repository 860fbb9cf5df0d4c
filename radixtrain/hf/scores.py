"""A batch -> scores of each sequence: of its labels, of the token that would come next, of its last hidden row.

`predict` writes them. Nothing is computed that no score reads: the backbone returns only the distinct rows that are
read (the last row of a shared prompt once, however many completions follow it), and the head runs on these or not at
all.

R distinct rows that are read, B sequences, P predictions, W words, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from radixtrain.errors import UserError, did_you_mean
from radixtrain.hf.backbone import Parts, parts_of
from radixtrain.hf.head import hidden_rows, is_padded, logits_rows, on_output
from radixtrain.hf.predicting_rows import PredictingRows, Targets, inputs_of, labelled_logprobs
from radixtrain.tree.radix_inputs import radix_of

OF_LABELS = ("logprobs", "completion_logprob", "perplexity")
OF_NEXT_TOKEN = ("next_token_logits", "next_token_logprobs", "next_token_probs")
SCORES = (*OF_LABELS, *OF_NEXT_TOKEN, "embedding")
"""The names of scores; `Scorer` says what each one is."""

Record = dict[str, Any]


def needs_labels(scores: Iterable[str]) -> bool:
    """Return whether one of these scores is of the labelled tokens of a sequence."""
    return any(name in OF_LABELS for name in scores)


def needs_next_tokens(scores: Iterable[str]) -> bool:
    """Return whether one of these scores needs words that must be named."""
    return any(name in OF_NEXT_TOKEN for name in scores)


def named_scores(scores: Iterable[str] | str | None) -> tuple[str, ...]:
    """Return the requested scores, given as one name or several; log-probabilities by default."""
    if scores is None:
        return ("logprobs",)
    return (scores,) if isinstance(scores, str) else tuple(scores)


def check_scores(scores: Iterable[str], next_tokens: Iterable[str] | None) -> None:
    """Raise UserError for no score, an unknown one, a score of words without words, and words without such a score."""
    scores = tuple(scores)
    unknown = [name for name in scores if name not in SCORES]
    if unknown or not scores:
        found = ", ".join(unknown) or "none"
        meant = did_you_mean(str(unknown[0]), SCORES) if unknown else ""
        raise UserError(f"model.scores: expected one or more of {', '.join(SCORES)}; found {found}{meant}")
    if needs_next_tokens(scores) and not next_tokens:
        raise UserError(
            f"model.next_tokens is missing: {', '.join(name for name in scores if name in OF_NEXT_TOKEN)} needs the "
            f'words to score, for instance ["yes", "no"]'
        )
    if next_tokens and not needs_next_tokens(scores):
        raise UserError(
            f"model.next_tokens: none of model.scores ({', '.join(scores)}) is of these words; add "
            f"{' or '.join(OF_NEXT_TOKEN)}, or leave next_tokens out"
        )


@dataclass(frozen=True)
class Scorer:
    """Scores the sequences of a batch. A name in `scores` stands for these entries of a sequence's record:

    logprobs: `tokens`, the labelled ones in their order, and `logprobs`, one for each.
    completion_logprob: the sum of these, and `num_tokens`, how many there are.
    perplexity: `exp(-completion_logprob / num_tokens)`, and `num_tokens`; None if there are none.
    next_token_logits: {word: logit} of the token that would come after the last one.
    next_token_logprobs: {word: log-probability} of it, among the whole vocabulary.
    next_token_probs: {word: probability} of it, among only these words.
    embedding: D numbers, the hidden row of the last token after the model's last norm.

    Softmax, norm and sums are computed in float32, or in float64 for a float64 model.

    next_tokens: the token id of each word.
    normalize_embeddings: whether an embedding is scaled to an L2 norm of 1.
    """

    scores: tuple[str, ...]
    next_tokens: Mapping[str, int] = field(default_factory=dict)
    normalize_embeddings: bool = True

    @torch.no_grad()
    def __call__(self, model: nn.Module, batch: Mapping[str, Any], plain_head: bool) -> list[Record]:
        """Make a record for each sequence of the batch, in order.

        model: shared for a batch of a `RadixCollator`, untouched for one of a `PaddedCollator`.
        batch: not merged, on the device of the model.
        plain_head: `has_plain_head(model)`, computed once for each model.
        """
        places = _ReadRows.of(batch, self.scores)
        only_hidden = plain_head or not (needs_labels(self.scores) or needs_next_tokens(self.scores))
        rows = _run(parts_of(model), batch, places.read, only_hidden)
        records: list[Record] = [{} for _ in range(len(radix_of(batch).cu_seqlens) - 1)]
        for entries in self._entries(rows, places, batch):
            for record, entry in zip(records, entries, strict=True):
                record.update(entry)
        return records

    def _entries(self, rows: _Rows, places: _ReadRows, batch: Mapping[str, Any]) -> Iterator[Iterable[Record]]:
        """Yield what each kind of score adds to the records."""
        if needs_labels(self.scores):
            labelled = labelled_logprobs(batch, rows.logprobs(places.labels, places.predictors))
            yield self._of_labels(labelled, len(radix_of(batch).cu_seqlens) - 1)
        if needs_next_tokens(self.scores):
            yield self._of_next_token(rows, places.last)
        if "embedding" in self.scores:
            yield [{"embedding": numbers} for numbers in _numbers(self._embeddings(rows, places.last))]

    def _of_labels(self, labelled: list[tuple[int, int, float]], num_sequences: int) -> Iterator[Record]:
        """Yield records of labels. labelled: (sequence, label, log-probability), in the order of the tokens."""
        tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        logprobs: list[list[float]] = [[] for _ in range(num_sequences)]
        for sequence, label, logprob in labelled:
            tokens[sequence].append(label)
            logprobs[sequence].append(logprob)
        for ids, values in zip(tokens, logprobs, strict=True):
            total, count = math.fsum(values), len(values)
            entries: dict[str, Record] = {
                "logprobs": {"tokens": ids, "logprobs": values},
                "completion_logprob": {"completion_logprob": total, "num_tokens": count},
                "perplexity": {"perplexity": math.exp(-total / count) if count else None, "num_tokens": count},
            }
            yield {key: value for name in self.scores for key, value in entries.get(name, {}).items()}

    def _of_next_token(self, rows: _Rows, last: Tensor) -> Iterator[Record]:
        """Yield records of the next token. last: (B,), int64, of the rows."""
        ids = torch.tensor(list(self.next_tokens.values()), device=last.device)
        logits = rows.logits_of(ids, last)
        found: dict[str, list[list[float]]] = {}
        for name in self.scores:
            if name == "next_token_logits":
                found[name] = _numbers(logits)
            elif name == "next_token_probs":
                found[name] = _numbers(logits.softmax(-1))
            elif name == "next_token_logprobs":
                each = rows.logprobs(ids.repeat(len(last)), last.repeat_interleave(len(ids)))
                found[name] = _numbers(each.view(len(last), len(ids)))
        for sequence in range(len(last)):
            yield {name: dict(zip(self.next_tokens, of[sequence], strict=True)) for name, of in found.items()}

    def _embeddings(self, rows: _Rows, last: Tensor) -> Tensor:
        """Return the embeddings, (B, D), float32 or float64. last: (B,), int64, of the rows."""
        embeddings = _widened(rows.hidden[last])
        return normalize(embeddings, dim=-1) if self.normalize_embeddings else embeddings


class _ReadRows(NamedTuple):
    """Which rows are read, and what reads them.

    read: (R,), int64. as `predictor_indices` of the batch has them; each once.
    labels: (P,), int64. predictors: (P,), int64. which of the R rows predicts each; both empty if no score reads them.
    last: (B,), int64. which of the R rows is the last token of each sequence; empty if no score reads it.
    """

    read: Tensor
    labels: Tensor
    predictors: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any], scores: tuple[str, ...]) -> _ReadRows:
        labels, rows, *_ = Targets.of(batch)
        predictors, last = radix_of(batch).predictor_indices[rows], _last_tokens(batch)
        if not needs_labels(scores):
            labels, predictors = labels[:0], predictors[:0]
        if all(name in OF_LABELS for name in scores):
            last = last[:0]
        read, places = torch.cat([predictors, last]).unique(return_inverse=True)
        return cls(read, labels, *places.split([len(predictors), len(last)]))


class _Rows(NamedTuple):
    """What the model computed for the R rows that are read.

    hidden: (R, D).
    logits: (R, V), by the model's own head; None if nothing reads them, or if `head` makes them in chunks.
    head: the matrix of the head; None if `logits` are given.
    """

    hidden: Tensor
    logits: Tensor | None
    head: nn.Linear | None

    def logprobs(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Return the log-probability of each label at its row, (P,), float32 or float64."""
        weights = torch.ones(len(labels), device=labels.device)
        if self.logits is not None:
            return PredictingRows(self.logits, None, Targets(labels, rows, weights)).logprobs()
        read, places = rows.unique(return_inverse=True)  # the last rows of an embedding need no logits
        return PredictingRows(self.hidden[read], self.head, Targets(labels, places, weights)).logprobs()

    def logits_of(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the logits of W tokens at B rows, (B, W), float32 or float64."""
        if self.logits is not None:
            return _widened(self.logits[rows[:, None], ids])
        assert self.head is not None
        bias = None if self.head.bias is None else self.head.bias[ids]
        return _widened(linear(self.hidden[rows], self.head.weight[ids], bias))


def _run(parts: Parts, batch: Mapping[str, Any], read: Tensor, only_hidden: bool) -> _Rows:
    """Run the backbone, and the model's own head unless `only_hidden`. read: (R,), int64. the rows that come back."""
    inputs = inputs_of(batch, predictor_indices=read)
    if only_hidden:
        return _Rows(hidden_rows(parts, inputs), None, parts.head)
    outputs: list[Tensor] = []
    with on_output(parts.backbone, lambda output: outputs.append(output[0])):
        logits = logits_rows(parts, inputs)  # the hidden rows come as well; for a radix batch those that are read
    hidden = outputs[0].flatten(0, 1)
    return _Rows(hidden[read] if is_padded(batch) else hidden, logits, None)


def _last_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the last token of each sequence, (B,), int64, counted as `predictor_indices` of this batch counts."""
    radix = radix_of(batch)
    ends = radix.cu_seqlens[1:].long()
    if radix.layout is not None:
        return radix.layout.inverse_indices[ends - 1]
    num_sequences, length = batch["input_ids"].shape
    starts = torch.arange(num_sequences, device=ends.device) * length
    return starts + ends - radix.cu_seqlens[:-1] - 1


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _numbers(values: Tensor) -> list[list[float]]:
    """List numbers, (N, K), for a file: a float32 with the 9 digits that determine it, half of Python's."""
    rows: list[list[float]] = values.tolist()
    return rows if values.dtype == torch.float64 else [[float(f"{value:.9g}") for value in row] for row in rows]
