"""The prefix tree of some sequences, as runs: rows that the same sequences pass through, without a branch or an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixtrain.data.tokens.decode import shortened, text_of_run
from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.plan import build_prefix_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 600  # of the text of a line


@dataclass(frozen=True)
class Segment:
    """Rows that the same sequences pass through, up to where one ends or they diverge.

    rows: first and one past the last. depth: tokens before it.
    sequences: all that pass through, by index. ends: those whose last token is the last row.
    children: indices of the runs that follow, in the order of the rows.
    """

    rows: tuple[int, int]
    depth: int
    sequences: list[int]
    ends: list[int]
    children: list[int]

    @property
    def num_tokens(self) -> int:
        return self.rows[1] - self.rows[0]


class RunTree(NamedTuple):
    """Runs in the order of their rows, parents first.

    roots: indices of those that nothing precedes. parents: (rows,), int64. the row before each, -1 at a root.
    """

    runs: list[Segment]
    roots: list[int]
    parents: IntArray


def run_tree(paths: Sequence[IntArray]) -> RunTree:
    """Build the tree of these sequences. paths: of each, the row of each of its tokens."""
    num_rows = max((int(path[-1]) + 1 for path in paths), default=0)
    parents, depths = np.full(num_rows, -1), np.zeros(num_rows, dtype=np.int64)
    for path in paths:
        parents[path[1:]], depths[path] = path[:-1], np.arange(len(path))
    stops = np.bincount(parents[parents >= 0], minlength=num_rows) > 1
    stops[[int(path[-1]) for path in paths]] = True
    is_start = parents != np.arange(num_rows) - 1
    is_start[1:] |= stops[:-1]
    is_start[:1] = True
    starts = np.flatnonzero(is_start)
    run_of = starts.searchsorted(np.arange(num_rows), side="right") - 1
    sequences, ends, children = (defaultdict[int, list[int]](list) for _ in range(3))
    for number, path in enumerate(paths):
        ends[int(run_of[path[-1]])].append(number)
        for run in np.unique(run_of[path]).tolist():
            sequences[run].append(number)
    for run, start in enumerate(starts.tolist()):
        children[int(run_of[parents[start]]) if parents[start] >= 0 else -1].append(run)
    bounds = enumerate(pairwise([*starts.tolist(), num_rows]))
    runs = [Segment(rows, int(depths[rows[0]]), sequences[run], ends[run], children[run]) for run, rows in bounds]
    return RunTree(runs, children[-1], parents)


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
        self.runs, self.roots, _ = run_tree([rows[start:end] for start, end in pairwise(bounds.tolist())])
        self.saved = [run.num_tokens * (len(run.sequences) - 1) for run in self.runs]
        for index, run in reversed([*enumerate(self.runs)]):
            self.saved[index] += sum(self.saved[child] for child in run.children)

    def lines(self, most: int) -> Iterator[TreeLine]:
        """Draw the runs with which sharing saves most, those below them counted, in pre-order; at most this many.

        Leaves out those that save less than 1 % of what the first saves.
        """
        ranked = sorted(range(len(self.runs)), key=lambda run: (-self.saved[run], run))[:most]
        shown = {run for run in ranked if self.saved[run] > 0.01 * self.saved[ranked[0]]}

        def below(depth: int, children: list[int]) -> list[tuple[int, int]]:
            """List what to draw, that which saves most at the end."""
            return [(depth, child) for child in sorted(shown.intersection(children), key=self.saved.__getitem__)]

        waiting = below(0, self.roots)
        while waiting:
            depth, index = waiting.pop()
            run, following = self.runs[index], below(depth + 1, self.runs[index].children)
            num_hidden = len(run.children) - len(following)
            yield TreeLine(depth, len(run.sequences), run.num_tokens, self._text(run), num_hidden)
            waiting += following

    def _text(self, run: Segment) -> str:
        ids = self.sequences[run.sequences[0]]
        return shortened(text_of_run(self.tokenizer, ids, run.depth, run.depth + run.num_tokens), MAX_CHARACTERS)
