"""The tokens of a sample as text or one by one. Brackets mark loss, so that it is readable without colour too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.columns import Columns
from rich.text import Text

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.tokens.decode import decode_runs
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_RUN = 40  # characters that a shortened run keeps
JOINERS = "\u200c\u200d"  # needed by Persian letters and by emoji
PICTURES = {code: chr(0x2400 + code) for code in range(32)}
AROUND = 5  # tokens to show on both sides of a place where the loss begins or ends
MOST_CHARS = 16
PART = "◌"  # stands for a part of a character, which the token that completes it shows


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


LOSS, SPECIAL, HIDDEN = "bold green", "cyan", "dim"
OPEN, CLOSE = "⟦", "⟧"
PICTURES |= {ord("\n"): "↵\n", ord("\t"): "⇥", 0x7F: "␡"}


def marked(
    tokens: Sequence[Token], max_chars: int | None = None, usual_weight: float = 1.0, breaks: bool = True
) -> Text:
    """Write the text of the tokens with `⟦ ⟧` around those that bear loss, and their weight after it if unusual.

    max_chars: runs with and without loss are shortened in the middle until about this many are left, with the number
        of tokens that are left out; None shows all.
    breaks: False shows line breaks only as `↵`, and does not break the line there.

    Line breaks are shown as `↵`, control characters as pictures, special tokens in another colour.
    """
    runs = [list(run) for _, run in groupby(tokens, key=lambda token: token.bears_loss)]
    most = len(runs) if max_chars is None else max(2, max_chars // LEAST_RUN)
    limit = None if max_chars is None else max(LEAST_RUN, max_chars // min(len(runs) or 1, most))
    first = last = len(runs)
    if len(runs) > most:
        first, last = most - most // 2, len(runs) - most // 2
    text = Text()
    for run in runs[:first]:
        text.append_text(_run(run, limit, usual_weight))
    if left_out := [token for run in runs[first:last] for token in run]:
        text.append_text(_hidden(len(left_out), sum(token.bears_loss for token in left_out)))
    for run in runs[last:]:
        text.append_text(_run(run, limit, usual_weight))
    return text if breaks else Text("").join(text.split("\n"))


def _hidden(num_tokens: int, num_labelled: int = 0) -> Text:
    """Write what replaces tokens that are not shown."""
    labelled = f", {num_labelled:,} with loss" if num_labelled else ""
    return Text(f" ⋯ {num_tokens:,} tokens{labelled} ⋯ " if num_tokens else "", style=HIDDEN)


def visible(text: str, breaks: bool = True) -> str:
    """Make line breaks, control characters and invisible characters of a text visible. breaks: break lines, too."""
    shown = text.translate(PICTURES)
    shown = "".join(c if c == "\n" or c in JOINERS or c.isprintable() else _escaped(c) for c in shown)
    return shown if breaks else shown.replace("\n", "")


def number(value: float) -> str:
    """Format a weight: whole ones without decimals."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def _run(run: Sequence[Token], limit: int | None, usual_weight: float) -> Text:
    """Write tokens that either all bear loss or all do not; beyond the limit, their middle is left out."""
    if limit is None or sum(len(token.text) for token in run) <= limit:
        body = _joined(run)
    else:
        head = max(1, _num_that_fit(run, limit // 2))
        tail = min(len(run) - head, _num_that_fit(run[::-1], limit // 2))
        body = Text.assemble(_joined(run[:head]), _hidden(len(run) - head - tail), _joined(run[len(run) - tail :]))
    if not run[0].bears_loss:
        return body
    return Text.assemble((OPEN, LOSS), body, (CLOSE, LOSS), (_weight(run, usual_weight), LOSS))


def _joined(tokens: Sequence[Token]) -> Text:
    text = Text()
    for token in tokens:
        style = LOSS if token.bears_loss else SPECIAL if token.is_special else ""
        text.append(visible(token.text), style=style)
    return text


def _weight(run: Sequence[Token], usual_weight: float) -> str:
    lowest, highest = (reduce(token.weight for token in run) for reduce in (min, max))
    if lowest == highest:
        return "" if lowest == usual_weight else f"×{number(lowest)}"
    return f"×{number(lowest)}…{number(highest)}"


def _num_that_fit(tokens: Sequence[Token], max_chars: int) -> int:
    return sum(chars <= max_chars for chars in accumulate(len(token.text) for token in tokens))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def token_cells(sample: TokenRow, tokenizer: PreTrainedTokenizerBase, full: bool = False) -> Columns:
    """Show `place id text` of each token, in columns. A label that is not the token itself follows it as `→id`.

    full: show all; otherwise those around the places where the loss begins and ends, and the first and last ones.
    """
    tokens = sample_tokens(sample, tokenizer)
    return Columns(_cells(sample, tokens, full), equal=True, column_first=False, padding=(0, 2))


def _cells(sample: TokenRow, tokens: Sequence[Token], full: bool) -> Iterator[Text]:
    shown = range(len(tokens)) if full else _shown(tokens)
    before = -1
    for place in shown:
        if place > before + 1:
            yield Text(f"⋯ {place - before - 1:,} tokens", style="dim")
        yield _cell(place, int(sample.input_ids[place]), int(sample.labels[place]), tokens[place])
        before = place


def _shown(tokens: Sequence[Token]) -> list[int]:
    """Return the places around an end or a change."""
    bears_loss = [token.bears_loss for token in tokens]
    edges = [0, *(place for place in range(1, len(tokens)) if bears_loss[place] != bears_loss[place - 1]), len(tokens)]
    near = {place for edge in edges for place in range(edge - AROUND, edge + AROUND)}
    return [place for place in range(len(tokens)) if place in near]


def _cell(place: int, token_id: int, label: int, token: Token) -> Text:
    shown = visible(token.text, breaks=False) or PART
    shown = shown if len(shown) <= MOST_CHARS else f"{shown[: MOST_CHARS - 1]}…"
    if not token.bears_loss:
        style = SPECIAL if token.is_special else ""
        return Text.assemble((f"{place:>5}", "dim"), f" {token_id:>6} ", (shown, style))
    other = f"→{label}" if label != token_id else ""
    weight = f"×{number(token.weight)}" if token.weight != 1 else ""
    return Text.assemble((f"{place:>5}", "dim"), f" {token_id:>6} ", (f"{OPEN}{shown}{CLOSE}{other}{weight}", LOSS))
