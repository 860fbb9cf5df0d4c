"""Which turns are trained where rows are nested: a log of an agent's requests holds each turn in all later rows too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.tokenized.store import TokenStore


def last_turns(store: TokenStore) -> np.ndarray:
    """(num_samples,), bool. The last sample of each conversation."""
    is_last = np.zeros(len(store.lengths), dtype=bool)
    is_last[store.starts[1:] - 1] = True
    return is_last


def distinct_turns(store: TokenStore) -> np.ndarray:
    """(num_samples,), bool. Every turn once, in the conversation that has most turns.

    Of turns that are samples, those with the same tokens, labels and weights are one. A whole chat is left out if
    another one begins with its tokens and labels. Rows that are equal as a whole stay, as often as they occur.
    """
    if len(store) < len(store.lengths):
        return _distinct_samples(store)
    return _not_continued(store) if store.has_several_answers() else np.ones(len(store), dtype=bool)


def _distinct_samples(store: TokenStore) -> np.ndarray:
    sizes = np.diff(store.starts)
    trained_in: dict[bytes, tuple[bytes, ...]] = {}
    is_chosen = np.zeros(len(store.lengths), dtype=bool)
    for place in np.argsort(-sizes, kind="stable"):
        row = tuple(_key(sample) for sample in store[place])
        first = store.starts[place]
        is_chosen[first : first + len(row)] = [trained_in.setdefault(key, row) == row for key in row]
    return is_chosen


def _not_continued(store: TokenStore) -> np.ndarray:
    tails = {len(chat.labels) - end for [chat] in store for end in _answer_ends(chat)[-1:]}
    continued = {_key(part) for [chat] in store for part in _shorter_chats(chat, tails)}
    return np.array([_key(chat) not in continued for [chat] in store], dtype=bool)


def _key(sample: TokenRow) -> bytes:
    digest = xxhash.xxh3_128(sample.input_ids.tobytes())
    digest.update(sample.labels.tobytes())
    if sample.loss_weights is not None:
        digest.update(sample.loss_weights.tobytes())
    return digest.digest()


def _answer_ends(chat: TokenRow) -> list[int]:
    """The place after each run of labels."""
    bears_loss = np.append(chat.labels != IGNORE_INDEX, False)
    return (np.flatnonzero(bears_loss[:-1] & ~bears_loss[1:]) + 1).tolist()


def _shorter_chats(chat: TokenRow, tails: set[int]) -> Iterator[TokenRow]:
    """What other chats may be that this one continues: each ends after an answer and what follows every answer.

    tails: lengths of what follows the last answer of a chat.
    """
    for end in _answer_ends(chat)[:-1]:
        for tail in tails:
            if (chat.labels[end : end + tail] == IGNORE_INDEX).all():
                yield chat.part(0, end + tail)
