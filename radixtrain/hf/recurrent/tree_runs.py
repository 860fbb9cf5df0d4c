"""The runs of a batch, for the mixers of a model: with forks, and for a mixer that cannot fork, without.

They come with the batch if the collator has a `step_cost` of the model. Otherwise they are made here, at the first
mixer, which on a device waits once a batch to read the segments.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.runs import RunLayout, cheapest_runs, runs_of_segments

__all__ = ["TreeRuns"]


class TreeRuns:
    """layout: of the batch. Its runs are made once, when the first mixer asks for them."""

    def __init__(self, layout: TreeLayout) -> None:
        self.layout = layout

    @cached_property
    def forked(self) -> RunLayout:
        """The runs that cost least."""
        if self.layout.runs is not None:
            return self.layout.runs
        return RunLayout.from_table(cheapest_runs(*self._segments)).to(self.layout.device, non_blocking=True)

    @cached_property
    def whole(self) -> RunLayout:
        """Runs without forks: each sequence from its first token on, as an ordinary batch has them."""
        if not self.forked.num_forks:
            return self.forked
        table = runs_of_segments(*self._segments, min_saved=None)
        return RunLayout.from_table(table).to(self.layout.device, non_blocking=True)

    @cached_property
    def _segments(self) -> tuple[IntArray, IntArray]:
        """`segment_starts` (S+1,) and `segment_parents` (S,) of the plan, on the host."""
        starts, ends = (
            x.cpu().numpy().astype(np.int64) for x in (self.layout.segment_starts, self.layout.subtree_ends)
        )
        return starts, parents_of(starts, ends)


def parents_of(segment_starts: IntArray, subtree_ends: IntArray) -> IntArray:
    """(S,), int64. The segment that each one continues, -1 at a root: in pre-order the last one whose subtree goes on.

    segment_starts, subtree_ends: (S+1,) and (S,). as in `PrefixPlan`.
    """
    ends, above, parents = subtree_ends.tolist(), [-1], []
    for segment, start in enumerate(segment_starts[:-1].tolist()):
        while len(above) > 1 and ends[above[-1]] <= start:
            above.pop()
        parents.append(above[-1])
        above.append(segment)
    return np.array(parents, dtype=np.int64)
