"""The prefix tree of a data set as text, pruned to the runs through which most tokens go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixtrain.data.tokens.decode import shortened, text_of_run
from radixtrain.report.contents import TreeNode
from radixtrain.tree.arrays import IntArray, back_to_back, cumulative
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 600  # of the text of a node


def prefix_tree(sequences: Sequence[IntArray], tokenizer: PreTrainedTokenizerBase, max_nodes: int = 200) -> TreeNode:
    """Build the tree of runs that these sequences share. Its root has an empty text and no tokens.

    sequences: (L,) each, int64. token ids. They need five times their size in memory, so pass a sample.
    max_nodes: most nodes below the root. Keeps the nodes through which most tokens go, those below them counted;
        `num_hidden_tokens` counts the unique tokens of what is left out.

    Raises ValueError if `max_nodes` is below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    packed, bounds = back_to_back(sequences)
    plan = build_prefix_plan(packed, bounds)
    return _Drawing(plan, packed, tokenizer, max_nodes).root()


class _Drawing:
    """Nodes of the plan's segments, cut further where a sequence ends, after which fewer continue.

    starts: (S+1,). first unique row of each run, and U. ends: (S,). one past the last row of all that follows it.
    passing: (S,). sequences that go through it.
    """

    def __init__(self, plan: PrefixPlan, packed: IntArray, tokenizer: PreTrainedTokenizerBase, max_nodes: int):
        self.plan, self.packed, self.tokenizer = plan, packed, tokenizer
        fewer = (np.diff(plan.counts) != 0).nonzero()[0] + 1
        self.starts = np.union1d(plan.segment_starts, fewer)
        segments = plan.segment_starts.searchsorted(self.starts[:-1], side="right") - 1
        self.ends, self.passing = plan.subtree_ends[segments], plan.counts[self.starts[:-1]]
        self.shown = self._heaviest(max_nodes)
        self.children: dict[int, list[int]] = {}
        for run, parent in enumerate(self._parents(segments)):
            self.children.setdefault(parent, []).append(run)

    def _parents(self, segments: IntArray) -> list[int]:
        """Return the run before each in its segment, (S,), or the last one of the segment above; -1 at a root."""
        parents = np.arange(len(segments)) - 1
        above = self.plan.segment_parents[segments]
        last_rows = self.plan.segment_starts[above + 1] - 1
        last_runs = np.where(above < 0, -1, self.starts.searchsorted(last_rows, side="right") - 1)
        is_first = self.starts[:-1] == self.plan.segment_starts[segments]
        return [int(parent) for parent in np.where(is_first, last_runs, parents)]

    def _heaviest(self, max_nodes: int) -> set[int]:
        """Select the nodes with most tokens; a stable sort keeps parents first, which have no fewer than a child."""
        tokens_before = cumulative(self.plan.counts)
        below = tokens_before[self.ends] - tokens_before[self.starts[:-1]]
        return set(np.argsort(-below, kind="stable")[:max_nodes].tolist())

    def root(self) -> TreeNode:
        """Build the tree from the leaves up, as 1,000 turns are 1,000 deep. -1 is the node above all runs."""
        nodes: dict[int, TreeNode] = {}
        for run in [*sorted(self.shown, reverse=True), -1]:
            start, end = (int(self.starts[run]), int(self.starts[run + 1])) if run >= 0 else (0, 0)
            below = sorted(self.children.get(run, []), key=lambda child: -self.passing[child])
            hidden = np.array([child for child in below if child not in nodes], dtype=np.int64)
            nodes[run] = TreeNode(
                text=shortened(self._text(start, end), MAX_CHARACTERS) if end else "",
                num_tokens=end - start,
                num_sequences=int(self.passing[run]) if end else self.plan.num_sequences,
                children=tuple(nodes[child] for child in below if child in nodes),
                num_hidden_children=len(hidden),
                num_hidden_sequences=int(self.passing[hidden].sum()),
                num_hidden_tokens=int((self.ends[hidden] - self.starts[hidden]).sum()),
            )
        return nodes[-1]

    def _text(self, start: int, end: int) -> str:
        """Decode unique tokens, from the first sequence that has them."""
        bounds = self.plan.cu_seqlens
        last = int(self.plan.gather_indices[end - 1])
        begin = int(bounds[bounds.searchsorted(last, side="right") - 1])
        depth = int(self.plan.position_ids[start])
        return text_of_run(self.tokenizer, self.packed[begin : last + 1], depth, last + 1 - begin)
