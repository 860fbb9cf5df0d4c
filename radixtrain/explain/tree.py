"""The prefix tree of some sequences, as runs: rows that the same sequences pass through, without a branch or an end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixtrain.explain.tokens import shortened, text_of_run
from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.plan import build_prefix_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 600  # of the text of a line


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
