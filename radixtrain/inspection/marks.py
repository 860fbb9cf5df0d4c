"""Tokens as coloured text that reads as well without colour: loss in brackets, line breaks and controls visible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from radixtrain.inspection.tokens import Token

__all__ = ["CLOSE", "LOSS", "OPEN", "SPECIAL", "hidden", "marked", "number", "shorten", "visible"]

LOSS, SPECIAL, HIDDEN = "bold green", "cyan", "dim"
OPEN, CLOSE = "⟦", "⟧"
LEAST_RUN = 40  # characters that a shortened run keeps
JOINERS = "\u200c\u200d"  # letters of Persian and parts of emoji need them
PICTURES = {code: chr(0x2400 + code) for code in range(32)}
PICTURES |= {ord("\n"): "↵\n", ord("\t"): "⇥", 0x7F: "␡"}


def marked(
    tokens: Sequence[Token], max_chars: int | None = None, usual_weight: float = 1.0, breaks: bool = True
) -> Text:
    """The text of the tokens with `⟦ ⟧` around those that bear loss, and their weight after it if it is unusual.

    max_chars: long runs are shortened in the middle until about this many are left; None shows all.
    breaks: False shows line breaks only as `↵`, and does not break the line there.
    """
    runs = [list(run) for _, run in groupby(tokens, key=lambda token: token.bears_loss)]
    first, last = _shown_runs(len(runs), max_chars)
    limit = None if max_chars is None else _limit([_num_chars(run) for run in runs[:first] + runs[last:]], max_chars)
    text = Text()
    for run in runs[:first]:
        text.append_text(_run(run, limit, usual_weight))
    if first < last:
        left_out = [token for run in runs[first:last] for token in run]
        text.append_text(hidden(len(left_out), sum(token.bears_loss for token in left_out)))
    for run in runs[last:]:
        text.append_text(_run(run, limit, usual_weight))
    return text if breaks else Text("").join(text.split("\n"))


def hidden(num_tokens: int, num_labelled: int = 0) -> Text:
    """What stands in place of tokens that are not shown."""
    plural = "" if num_tokens == 1 else "s"
    labelled = f", {num_labelled:,} with loss" if num_labelled else ""
    return Text(f" ⋯ {num_tokens:,} token{plural}{labelled} ⋯ ", style=HIDDEN)


def visible(text: str) -> str:
    """The text with its line breaks, control characters and invisible characters shown."""
    shown = text.translate(PICTURES)
    return "".join(c if c == "\n" or c in JOINERS or c.isprintable() else _escaped(c) for c in shown)


def number(value: float) -> str:
    """A weight: whole ones without decimals."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def shorten(run: Sequence[Token], max_chars: int) -> tuple[Sequence[Token], int, Sequence[Token]]:
    """The first tokens, how many are left out, and the last tokens; all are first ones if they are short enough."""
    if _num_chars(run) <= max_chars:
        return run, 0, []
    head = max(1, _num_that_fit(iter(run), max_chars // 2))
    tail = min(len(run) - head, _num_that_fit(reversed(run), max_chars // 2))
    return run[:head], len(run) - head - tail, run[len(run) - tail :]


def _run(run: Sequence[Token], limit: int | None, usual_weight: float) -> Text:
    """Tokens that all bear loss, or none."""
    head, num_hidden, tail = (run, 0, []) if limit is None else shorten(run, limit)
    body = _joined(head)
    if num_hidden:
        body.append_text(hidden(num_hidden)).append_text(_joined(tail))
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


def _shown_runs(num_runs: int, max_chars: int | None) -> tuple[int, int]:
    """The runs from the first number to the second one are left out."""
    most = num_runs if max_chars is None else max(2, max_chars // LEAST_RUN)
    return (num_runs, num_runs) if num_runs <= most else (most - most // 2, num_runs - most // 2)


def _limit(lengths: list[int], max_chars: int) -> int:
    """The most characters of a run with which all of them have at most `max_chars`, or `LEAST_RUN` if that is more."""
    left = max_chars
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return max(share, LEAST_RUN)
        left -= length
    return max(max_chars, LEAST_RUN)


def _num_that_fit(tokens: Iterator[Token], max_chars: int) -> int:
    count = chars = 0
    for token in tokens:
        chars += len(token.text)
        if chars > max_chars:
            break
        count += 1
    return count


def _num_chars(run: Sequence[Token]) -> int:
    return sum(len(token.text) for token in run)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
