"""The tokens of a sample as text. Brackets mark loss, so that it is readable without colour too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.tokens.decode import decode_runs
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_RUN = 40  # characters that a shortened run keeps
JOINERS = "\u200c\u200d"  # needed by Persian letters and by emoji
SIGNS = {"\n": "↵\n", "\t": "⇥", "\r": "␍"}
LOSS, SPECIAL, HIDDEN = "bold green", "cyan", "dim"
OPEN, CLOSE = "⟦", "⟧"


class Token(NamedTuple):
    """A token as a person reads it.

    text: decoded; empty for one that ends inside a character, which the token that completes it shows.
    bears_loss: whether it is learned, i.e. predicted from the token before it.
    is_special: a token of the tokenizer's own, such as one that ends a turn.
    weight: of its loss.
    """

    text: str
    bears_loss: bool = False
    is_special: bool = False
    weight: float = 1.0


def sample_tokens(sample: TokenRow, tokenizer: PreTrainedTokenizerBase) -> list[Token]:
    """Return the tokens of a sample. The first one is never predicted, and so bears no loss whatever its label is."""
    bears_loss = sample.labels != IGNORE_INDEX
    bears_loss[:1] = False
    weights = np.ones(len(bears_loss)) if sample.loss_weights is None else sample.loss_weights
    is_special = np.isin(sample.input_ids, tokenizer.all_special_ids)
    columns = (column.tolist() for column in (bears_loss, is_special, weights))
    return [Token(*entries) for entries in zip(token_texts(sample.input_ids, tokenizer), *columns, strict=True)]


def token_texts(ids: IntArray | Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token; `<id>` for one that the tokenizer does not know."""
    num_known = len(tokenizer)
    known = [0 <= token < num_known for token in ids]
    read = [token for token, is_known in zip(ids, known, strict=True) if is_known]
    texts = iter(decode_runs(tokenizer, read, range(len(read) + 1)))
    return [next(texts) if is_known else f"<{token}>" for token, is_known in zip(ids, known, strict=True)]


def visible(text: str) -> str:
    """Make line breaks, which follow their sign, control characters and invisible characters of a text visible."""
    return "".join(c if c.isprintable() or c in JOINERS else SIGNS.get(c) or ascii(c)[1:-1] for c in text)


def marked(
    tokens: Sequence[Token], max_chars: int | None = None, usual_weight: float = 1.0, breaks: bool = True
) -> Text:
    """Write the text of the tokens with `⟦ ⟧` around those that bear loss, and their weight after it if unusual.

    max_chars: runs with and without loss are shortened in the middle until about this many are left, but no run to
        less than 40, with the number of tokens that are left out; None shows all.
    breaks: False shows line breaks only as `↵`, and does not break the line there.

    Special tokens have another colour.
    """
    runs = [list(run) for _, run in groupby(tokens, key=lambda token: token.bears_loss)]
    text = Text()
    for run in runs:
        body = _joined(run) if max_chars is None else _shortened(run, max(LEAST_RUN, max_chars // len(runs)) // 2)
        if run[0].bears_loss:
            body = Text.assemble((OPEN, LOSS), body, (CLOSE + _weight(run, usual_weight), LOSS))
        text.append_text(body)
    return text if breaks else Text("").join(text.split("\n"))


def _shortened(run: Sequence[Token], most: int) -> Text:
    """Write both ends of a run. most: characters of each."""
    lengths = [len(token.text) for token in run]
    ends = (sum(chars <= most for chars in accumulate(each)) for each in (lengths, lengths[::-1]))
    head, tail = (max(1, end) for end in ends)
    if sum(lengths) <= 2 * most or (hidden := len(run) - head - tail) < 2:
        return _joined(run)
    return Text.assemble(_joined(run[:head]), (f" ⋯ {hidden:,} tokens ⋯ ", HIDDEN), _joined(run[-tail:]))


def _joined(tokens: Sequence[Token]) -> Text:
    text = Text()
    for token in tokens:
        style = LOSS if token.bears_loss else SPECIAL if token.is_special else ""
        text.append(visible(token.text), style=style)
    return text


def _weight(run: Sequence[Token], usual_weight: float) -> str:
    lowest, highest = (reduce(token.weight for token in run) for reduce in (min, max))
    if lowest == highest:
        return "" if lowest == usual_weight else f"×{_number(lowest)}"
    return f"×{_number(lowest)}…{_number(highest)}"


def _number(value: float) -> str:
    """Format a weight: whole ones without decimals."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
