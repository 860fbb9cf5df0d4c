"""Generated tries, with and without labels, and recurrent layers that fork wherever they can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from radixtrain.tree import runs
from radixtrain.verification.oracle import Features

FREE_FORKS = runs.RunCost(call=0.0, row=1.0, state=0.0)
# A sequence that gives every parameter of a small model a gradient: if every query sees one key, q and k have none.
ALIVE = [1, 0, 1, 1, 0, 0, 1, 0]


@contextmanager
def free_forks() -> Iterator[None]:
    """Let recurrent layers fork at nearly every branch, in rows of any length: only rows cost something."""
    before, runs.RATES = runs.RATES, FREE_FORKS
    try:
        yield
    finally:
        runs.RATES = before


def ragged_batches(
    *, min_sequences: int = 1, max_sequences: int = 8, max_length: int = 10, vocab_size: int = 4, min_length: int = 1
) -> SearchStrategy[list[list[int]]]:
    """Return a hypothesis strategy for batches of token sequences that share prefixes in every possible way.

    Each sequence after the first is new, or a copy, a prefix, an extension or a fork of an earlier one. So the batches
    hold nested, identical and unrelated sequences, prefixes of others, single tokens and, with `min_length` 0, empty
    sequences, in any order.

    vocab_size: token ids are 0 ... vocab_size - 1. The default is small, so that unrelated sequences share by chance.
    min_length, max_length: tokens of a sequence.
    """
    tokens = st.integers(0, vocab_size - 1)
    kinds = ["fork", "fork", "fork", "extension", "prefix", "copy", "new"]

    @st.composite
    def batches(draw: Any) -> list[list[int]]:
        sequences: list[list[int]] = []
        for _ in range(draw(st.integers(min_sequences, max_sequences))):
            kind = draw(st.sampled_from(kinds if any(sequences) else ["new"]))
            if kind == "new":
                sequences.append(draw(st.lists(tokens, min_size=min_length, max_size=max_length)))
                continue
            sequence = draw(st.sampled_from([sequence for sequence in sequences if sequence]))
            place = draw(st.integers(min_length, len(sequence))) if kind in ("fork", "prefix") else len(sequence)
            tail = draw(st.lists(tokens, min_size=1, max_size=4)) if kind in ("fork", "extension") else []
            if kind == "fork" and place < len(sequence) and vocab_size > 1:
                tail[0] = (sequence[place] + 1 + tail[0] % (vocab_size - 1)) % vocab_size  # not the token there
            sequences.append([*sequence[:place], *tail][:max_length])
        return draw(st.permutations(sequences))

    return batches()


def labelled_features(**options: Any) -> SearchStrategy[Features]:
    """Return a hypothesis strategy for features of a `RadixCollator`: `ragged_batches` with labels and positions.

    Labels are anywhere: on shared tokens, different in two copies, or missing in a whole sequence. Half of the batches
    have `position_ids`: with an offset, with jumps, and different ones for equal tokens. One more sequence has a label
    on every token, so that no gradient of a small model is zero.

    options: as for `ragged_batches`.
    """

    @st.composite
    def features(draw: Any) -> Features:
        sequences = draw(ragged_batches(**options))
        steps = st.lists(st.integers(1, 3), min_size=options.get("max_length", 10), max_size=40)
        places = [[draw(st.integers(0, 5)), *draw(steps)] for _ in range(2)] if draw(st.booleans()) else []
        made: list[dict[str, list[int]]] = [{"input_ids": ALIVE, "labels": ALIVE}]
        for ids in sequences:
            bears_loss = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            feature = {"input_ids": ids, "labels": [t if b else -100 for t, b in zip(ids, bears_loss, strict=True)]}
            if places:
                feature["position_ids"] = list(accumulate(draw(st.sampled_from(places))[: len(ids)]))
            made.append(feature)
        return made

    return features()
