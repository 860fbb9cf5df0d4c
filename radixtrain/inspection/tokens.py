"""Tokens with their text, whether they bear loss, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixtrain.collators.features import IGNORE_INDEX
from radixtrain.data.sample import Sample
from radixtrain.data.tokens.decode import decode_runs
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Token", "sample_tokens", "token_texts"]


class Token(NamedTuple):
    """A token as a person reads it.

    text: decoded; empty for one that ends inside a character, which the token that completes it shows.
    bears_loss: whether it is learned, that is predicted from the token before it.
    is_special: a token of the tokenizer's own, such as one that ends a turn.
    weight: of its loss.
    """

    text: str
    bears_loss: bool = False
    is_special: bool = False
    weight: float = 1.0


def sample_tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Token]:
    """The tokens of a sample. The first one is never predicted, and so bears no loss whatever its label is."""
    bears_loss = sample.labels != IGNORE_INDEX
    bears_loss[:1] = False
    weights = np.ones(len(bears_loss)) if sample.loss_weights is None else sample.loss_weights
    is_special = np.isin(sample.input_ids, tokenizer.all_special_ids)
    columns = (column.tolist() for column in (bears_loss, is_special, weights))
    return [Token(*entries) for entries in zip(token_texts(sample.input_ids, tokenizer), *columns, strict=True)]


def token_texts(ids: IntArray | Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each token; `<id>` for one that the tokenizer does not know."""
    num_known = len(tokenizer)
    known = [0 <= token < num_known for token in ids]
    read = [token for token, is_known in zip(ids, known, strict=True) if is_known]
    texts = iter(decode_runs(tokenizer, read, range(len(read) + 1)))
    return [next(texts) if is_known else f"<{token}>" for token, is_known in zip(ids, known, strict=True)]
