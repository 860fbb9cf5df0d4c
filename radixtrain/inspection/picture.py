"""A micro-batch's prefix tree with its text, drawn for a terminal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from radixtrain.inspection.runs import Prediction, Run, RunTree
from radixtrain.inspection.tokens import LOSS, marked, number, visible

MOST_CHARS, MOST_BRANCHES, MOST_NAMES = 240, 12, 3
MOST_LEVELS = 8  # drawn further to the right; after them the longest branch goes on at its parent's level
LONG = 6  # levels of a branch that is a conversation going on, if the others beside it are shorter
HEADER = "bold"


def draw(tree: RunTree, wheres: Sequence[str], full: bool = False) -> Tree:
    """The runs as a tree, in the order of the rows. A long branch among short ones stays on its parent's level.

    wheres: file and line of each sequence.
    full: show all tokens and all branches; otherwise long runs are shortened and late branches counted.
    """
    root = Tree("", hide_root=True, guide_style="dim")
    drawing = _Drawing(tree, wheres, full)
    drawing.add_all(root, tree.roots, level=0)
    return root


def named_rows(wheres: Iterable[str], most: int = MOST_NAMES) -> str:
    """`chats.jsonl:3, chats.jsonl:5 (2 samples) and 4 more`, without folders."""
    counted = Counter(os.path.basename(where) for where in wheres)
    names = [f"{name} ({count} samples)" if count > 1 else name for name, count in counted.items()]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def asked_for(prediction: Prediction) -> str:
    """`"text" ×weight` on one line."""
    text = visible(prediction.text).replace("\n", "")
    return f'"{text}" ×{number(prediction.weight)}'


@dataclass(frozen=True)
class _Drawing:
    tree: RunTree
    wheres: Sequence[str]
    full: bool

    def add_all(self, node: Tree, children: Sequence[int], level: int) -> None:
        most = len(children) if self.full else MOST_BRANCHES
        for child in children[:most]:
            self._add(node, child, level)
        if left_out := [run for child in children[most:] for run in self._below(child)]:
            num_tokens = sum(len(self.tree.runs[run].tokens) for run in left_out)
            node.add(Text(f"⋯ {len(children) - most:,} more branches, {num_tokens:,} tokens ⋯", style="dim"))

    def _add(self, node: Tree, index: int, level: int) -> None:
        """A run and all that follows it."""
        before: Run | None = None
        going_on: int | None = index
        while going_on is not None:
            run = self.tree.runs[going_on]
            branch = node.add(Group(*self._lines(run, before)))
            goes_on = before is not None
            before, going_on = run, self._trunk(run.children, level, goes_on)
            self.add_all(branch, [child for child in run.children if child != going_on], level + 1)

    def _trunk(self, children: Sequence[int], level: int, goes_on: bool) -> int | None:
        """The child that is drawn on its parent's level, so that a long conversation does not run off to the right.

        goes_on: whether the parent is such a child itself.
        """
        longest = max(children, key=self.heights.__getitem__, default=None)
        if longest is None or len(children) == 1 or level >= MOST_LEVELS:
            return longest
        long = 2 if goes_on else LONG
        is_long = [self.heights[child] >= long for child in children]
        return longest if sum(is_long) == 1 else None

    @cached_property
    def heights(self) -> list[int]:
        """Runs on the longest way down from each run, itself included."""
        heights: list[int] = []
        for run in reversed(self.tree.runs):  # children come after their parent
            below = (heights[len(self.tree.runs) - 1 - child] for child in run.children)
            heights.append(1 + max(below, default=0))
        return heights[::-1]

    def _lines(self, run: Run, before: Run | None) -> list[Text]:
        text = marked(run.tokens, None if self.full else MOST_CHARS, len(run.sequences), breaks=False)
        lines = [self._header(run, before), text]
        if len(run.children) > 1 or len(run.predictions) > 1:
            lines += _predicts(run.predictions, None if self.full else MOST_BRANCHES)
        return lines

    def _header(self, run: Run, before: Run | None) -> Text:
        first, last = run.rows[0], run.rows[1] - 1
        after = f" after token {before.rows[1] - 1}" if before is not None else ""
        places = f"token {first}{after}" if first == last else f"tokens {first}-{last}{after}: {len(run.tokens):,}"
        num_labelled = sum(token.bears_loss for token in run.tokens)
        loss = f", {num_labelled:,} with loss" if num_labelled else ""
        text = Text.assemble((f"×{len(run.sequences)}", HEADER), f"  {places}{loss}")
        if run.ends:
            text.append(f"; ends {named_rows(self.wheres[end] for end in run.ends)}")
        text.stylize("dim", 1 + len(str(len(run.sequences))))
        return text

    def _below(self, index: int) -> list[int]:
        """A run and those that follow it: they are neighbours in the order of the rows."""
        found, waiting = [], [index]
        while waiting:
            found.append(waiting.pop())
            waiting += self.tree.runs[found[-1]].children
        return found


def _predicts(predictions: Sequence[Prediction], most: int | None) -> list[Text]:
    """What the last token of a run is asked for, the heaviest first."""
    if not predictions:
        return []
    heaviest = sorted(predictions, key=lambda one: -one.weight)
    words = ", ".join(map(asked_for, heaviest[:most]))
    more = f" and {len(heaviest) - most:,} more" if most is not None and len(heaviest) > most else ""
    return [Text.assemble((f"token {heaviest[0].row} predicts ", "dim"), (words + more, LOSS))]
