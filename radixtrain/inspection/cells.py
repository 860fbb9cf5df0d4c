"""Tokens one by one: place, id, text, whether it bears loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.columns import Columns
from rich.text import Text

from radixtrain.data.sample import Sample
from radixtrain.inspection.marks import CLOSE, LOSS, OPEN, SPECIAL, number, visible
from radixtrain.inspection.tokens import Token, sample_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["token_cells"]

AROUND = 5  # tokens that are shown on both sides of each place where the loss begins or ends
MOST_CHARS = 16
PART = "◌"  # stands for a part of a character, which the token that completes it shows


def token_cells(sample: Sample, tokenizer: PreTrainedTokenizerBase, full: bool = False) -> Columns:
    """`place id text` of each token, in columns. A label that is not the token itself follows it as `→id`.

    full: show all; otherwise those around the places where the loss begins and ends, and the first and last ones.
    """
    tokens = sample_tokens(sample, tokenizer)
    return Columns(_cells(sample, tokens, full), equal=True, column_first=False, padding=(0, 2))


def _cells(sample: Sample, tokens: Sequence[Token], full: bool) -> Iterator[Text]:
    shown = range(len(tokens)) if full else _shown(tokens)
    before = -1
    for place in shown:
        if place > before + 1:
            yield Text(f"⋯ {place - before - 1:,} tokens", style="dim")
        yield _cell(place, int(sample.input_ids[place]), int(sample.labels[place]), tokens[place])
        before = place


def _shown(tokens: Sequence[Token]) -> list[int]:
    """Places within `AROUND` of an end or of a change, and those that are the only one left out between two others."""
    bears_loss = np.array([token.bears_loss for token in tokens], dtype=bool)
    changes = [0, *(np.flatnonzero(np.diff(bears_loss)) + 1).tolist(), len(tokens)]
    kept = np.zeros(len(tokens) + 2, dtype=bool)
    kept[[0, -1]] = True
    for change in changes:
        kept[1 + max(0, change - AROUND) : 1 + change + AROUND] = True
    kept[1:-1] |= kept[:-2] & kept[2:]
    return np.flatnonzero(kept[1:-1]).tolist()


def _cell(place: int, token_id: int, label: int, token: Token) -> Text:
    shown = visible(token.text).replace("\n", "") or PART
    shown = shown if len(shown) <= MOST_CHARS else f"{shown[: MOST_CHARS - 1]}…"
    if not token.bears_loss:
        style = SPECIAL if token.is_special else ""
        return Text.assemble((f"{place:>5}", "dim"), f" {token_id:>6} ", (shown, style))
    other = f"→{label}" if label != token_id else ""
    weight = f"×{number(token.weight)}" if token.weight != 1 else ""
    return Text.assemble((f"{place:>5}", "dim"), f" {token_id:>6} ", (f"{OPEN}{shown}{CLOSE}{other}{weight}", LOSS))
