"""The tokens of samples and of a tree of them, as text. Brackets mark loss, so that it is readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.plan import build_prefix_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LEAST_RUN = 40  # characters that a shortened run keeps
JOINERS = "\u200c\u200d"  # needed by Persian letters and by emoji
SIGNS = {"\n": "↵\n", "\t": "⇥", "\r": "␍"}
LOSS, SPECIAL, HIDDEN = "bold green", "cyan", "dim"
OPEN, CLOSE = "⟦", "⟧"
MAX_CHARACTERS = 600  # of the text of a line
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are not, or not yet, a character
CONTEXT = 8  # tokens before a run that are decoded with it: a character has at most 4 bytes


def decode_runs(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | IntArray, bounds: Iterable[int]) -> list[str]:
    """Return the text of each run of a sequence, special tokens included.

    ids: (L,). the whole sequence; a run deep in a prefix tree is given with the tokens above it.
    bounds: (n + 1,). rising, from 0 to L: run i is `ids[bounds[i] : bounds[i + 1]]`.

    A character whose bytes lie on both sides of a bound is in the run that completes it, so that a shared run
    has the same text whatever follows it. Each token is decoded a constant number of times.
    """
    tokens, ends = [*map(int, ids)], [*map(int, bounds)]
    texts: list[str] = []
    context = start = 0  # ends of the last two runs that ended with a whole character
    written = ""  # text of the runs since `context`
    for end in ends[1:]:
        text = _decode(tokenizer, tokens[context:end])
        whole = text if end == len(tokens) else text.rstrip(BROKEN)
        texts.append(whole[len(written) :])
        written = max(written, whole, key=len)
        if whole == text and end > start:
            written = _decode(tokenizer, tokens[start:end])
            context, start = start, end
    return texts


def text_of_run(tokenizer: PreTrainedTokenizerBase, ids: IntArray, start: int, end: int) -> str:
    """Return the text of the tokens [start, end) of a sequence, its special tokens included.

    ids: (L,), int64. the whole sequence, since the text of a run depends on what precedes it.

    A character that a border cuts belongs to the run that completes it, so the runs of a sequence join to its text.
    """
    first = max(0, start - CONTEXT)
    return decode_runs(tokenizer, ids[first:end], [0, start - first, end - first])[-1].rstrip(BROKEN)


def shortened(text: str, max_characters: int) -> str:
    """Replace the middle of a text by an ellipsis if it has more characters."""
    if len(text) <= max_characters:
        return text
    end = max_characters // 3
    return f"{text[: max_characters - end - 3]} … {text[len(text) - end :]}"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


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
    special, texts = set(tokenizer.all_special_ids), token_texts(sample.input_ids, tokenizer)
    weights = np.ones(len(texts)) if sample.loss_weights is None else sample.loss_weights
    columns = zip(texts, sample.input_ids.tolist(), sample.labels.tolist(), weights.tolist(), strict=True)
    return [
        Token(text, place > 0 and label != IGNORE_INDEX, token in special, weight)
        for place, (text, token, label, weight) in enumerate(columns)
    ]


def token_texts(ids: IntArray | Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token; `<id>` for one that the tokenizer does not know."""
    is_known = [0 <= token < len(tokenizer) for token in ids]
    known = [token if known else 0 for token, known in zip(ids, is_known, strict=True)]
    texts = decode_runs(tokenizer, known, range(len(known) + 1))
    return [text if known else f"<{token}>" for text, token, known in zip(texts, ids, is_known, strict=True)]


def visible(text: str) -> str:
    """Make line breaks, which follow their sign, control characters and invisible characters of a text visible."""
    return "".join(c if c.isprintable() or c in JOINERS else SIGNS.get(c) or ascii(c)[1:-1] for c in text)


def marked(
    tokens: Sequence[Token], max_chars: int | None = None, usual_weight: float = 1.0, breaks: bool = True
) -> Text:
    """Write the text of the tokens with `⟦ ⟧` around those that bear loss, and their weight after it if unusual.

    max_chars: runs with and without loss are shortened in the middle until about this many are left, but no run to
        less than 40; None shows all.
    breaks: False shows line breaks only as `↵`, and does not break the line there.

    Special tokens have another colour.
    """
    runs = [list(run) for _, run in groupby(tokens, key=lambda token: token.bears_loss)]
    most = max(LEAST_RUN, max_chars // max(1, len(runs))) if max_chars else None
    text = Text()
    for run in runs:
        body = _shortened(_joined(run), most)
        if run[0].bears_loss:
            body = Text.assemble((OPEN, LOSS), body, (CLOSE + _weight(run, usual_weight), LOSS))
        text.append_text(body)
    return text if breaks else Text("").join(text.split("\n"))


def _shortened(text: Text, most: int | None) -> Text:
    """Leave out the middle of a text of more characters."""
    if most is None or (hidden := len(text) - most) <= 0:
        return text
    return Text.assemble(text[: most // 2], (f" ⋯ {hidden:,} characters ⋯ ", HIDDEN), text[-(most // 2) :])


def _joined(tokens: Sequence[Token]) -> Text:
    text = Text()
    for token in tokens:
        style = LOSS if token.bears_loss else SPECIAL if token.is_special else ""
        text.append(visible(token.text), style=style)
    return text


def _weight(run: Sequence[Token], usual_weight: float) -> str:
    lowest, highest = (reduce(token.weight for token in run) for reduce in (min, max))
    if lowest == highest:
        return "" if lowest == usual_weight else f"×{lowest:g}"
    return f"×{lowest:g}…{highest:g}"


@dataclass
class Run:
    """Rows that the same sequences pass through, up to where one ends or they diverge.

    start, end: its first row and one past its last. depth: tokens before it.
    sequences: all that pass through, by index. ends: those whose last token is the last row.
    children: indices of the runs that follow, in the order of the rows.
    """

    start: int
    end: int
    depth: int = 0
    sequences: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.end - self.start


def run_tree(paths: Sequence[IntArray]) -> tuple[list[Run], list[int]]:
    """Build the tree of these sequences: its runs in the order of their rows, and the indices of those at a root.

    paths: of each sequence, the row of each of its tokens.
    """
    bounds = [np.zeros(0, dtype=np.int64)]
    for path in paths:  # a run begins where a sequence comes from another row, and after the row that it leaves
        jumps = np.flatnonzero(np.diff(path) != 1)
        bounds += [path[:1], path[jumps + 1], path[jumps] + 1, path[-1:] + 1]
    starts = np.unique(np.concatenate(bounds))
    runs, roots = [Run(*rows) for rows in pairwise(starts.tolist())], list[int]()
    for number, path in enumerate(paths):
        siblings, depth = roots, 0
        for index in np.unique(starts.searchsorted(path, side="right") - 1).tolist():
            run = runs[index]
            if not run.sequences:
                siblings.append(index)
                run.depth = depth
            run.sequences.append(number)
            siblings, depth = run.children, depth + len(run)
        runs[index].ends.append(number)
    for siblings in (roots, *(run.children for run in runs)):
        siblings.sort()
    return runs, roots


class TreeLine(NamedTuple):
    """A run of tokens in a picture of the tree.

    depth: of the line, from 0. text: shortened in its middle if it is long. num_hidden: branches after it that are left
    out.
    """

    depth: int
    num_sequences: int
    num_tokens: int
    text: str
    num_hidden: int


class TextTree:
    """The tree of the sequences of a data set, with their text.

    sequences: (L,) each, int64. They need five times their size in memory, so pass a sample.
    """

    def __init__(self, sequences: Sequence[IntArray], tokenizer: PreTrainedTokenizerBase):
        packed, bounds = back_to_back(sequences)
        rows = build_prefix_plan(packed, bounds).inverse_indices
        self.sequences, self.tokenizer = sequences, tokenizer
        self.runs, self.roots = run_tree([rows[start:end] for start, end in pairwise(bounds.tolist())])
        self.saved = [len(run) * (len(run.sequences) - 1) for run in self.runs]
        for index, run in reversed([*enumerate(self.runs)]):
            self.saved[index] += sum(self.saved[child] for child in run.children)

    def lines(self, most: int) -> Iterator[TreeLine]:
        """Draw the runs with which sharing saves most, those below them counted, in pre-order; at most this many.

        Leaves out those that save less than 1 % of what the first saves.
        """
        ranked = sorted(range(len(self.runs)), key=lambda run: (-self.saved[run], run))[:most]
        shown = {run for run in ranked if self.saved[run] > 0.01 * self.saved[ranked[0]]}

        def below(depth: int, children: list[int]) -> Iterator[TreeLine]:
            following = shown.intersection(children)
            for index in sorted(following, key=lambda run: -self.saved[run]):
                run = self.runs[index]
                ids, end = self.sequences[run.sequences[0]], run.depth + len(run)
                text = shortened(text_of_run(self.tokenizer, ids, run.depth, end), MAX_CHARACTERS)
                num_hidden = len(run.children) - len(shown.intersection(run.children))
                yield TreeLine(depth, len(run.sequences), len(run), text, num_hidden)
                yield from below(depth + 1, run.children)

        yield from below(0, self.roots)
