"""The prefix plan as runs: what a layer with a recurrent state computes in one go, from one state to the next.

Attention sees a tree through a mask. A recurrent layer (gated delta rule, state space, short convolution) reads a
sequence in order, so on a tree it works in runs: rows back to back on one path from a root. A run starts from the final
state of the run above it, or from nothing. The run above is a *fork*: its final state is kept, and all runs that
continue it start from a copy.

    segments        forks at every branch         only the first one worth it
    A ─┬─ B ─┬─ C   A │ B │ C    5 runs           A │ B C      4 runs, B is computed twice
       │     └─ D         │ D                       │ B D
       └─ E           │ E                           │ E

Every row of the plan has its output from exactly one run; the others that contain it only carry its state on, so values
and gradients are those of each sequence by itself, whichever forks are chosen. A fork costs a state to keep and a call
or more; without it rows are computed again. `RunCost` decides.

Runs are computed in calls of equal shape:

- forks of one level that have the same length, because padding would change the final state. To get equal lengths a
  fork may be placed some rows before the branch, and the rows after it belong to the runs that continue it;
- last of all the leaves of every level, sorted by length and padded on the right: nothing follows them.

No call has one row after a state, so no fork is shorter than two rows and a leaf of one row is padded: Hugging Face's
mixers take one for a step of generation, which writes into the state in place and has no gradient in some kernels.

The layers: gated delta rule (arXiv 2412.06464, section 3), Mamba 2 (arXiv 2405.21060), short convolutions. NumPy only,
as for the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from radixtrain.tree.arrays import IntArray

__all__ = ["RunCall", "RunCost", "RunTable"]


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What recurrent layers cost, forward and backward; in seconds, or in rows if nothing was measured.

    call: of the layer, of any size.
    row: computed, a padded one included.
    chunk: of `chunk_rows` rows of a run, a last one with fewer included: kernels pad each run to whole chunks.
    state: kept, or handed to a run.
    can_fork: False if no layer can start from a state, so that each path is one run.
    """

    call: float = 64.0
    row: float = 1.0
    chunk: float = 0.0
    chunk_rows: int = 64
    state: float = 8.0
    can_fork: bool = True

    def of_call(self, num_runs: Any, length: Any) -> Any:
        """What calls of these shapes cost without their states. num_runs, length: numbers, or arrays that broadcast."""
        chunks = -(-length // self.chunk_rows)
        return self.call + num_runs * (length * self.row + chunks * self.chunk)


class RunCall(NamedTuple):
    """One call of a layer: `num_runs` runs of `length` rows each.

    keeps: 1 if their final states are kept for later calls.
    sources: pairs of a call and a number: so many runs, in order, start from states that this call kept. Empty for runs
        that start from nothing.
    """

    num_runs: int
    length: int
    keeps: int
    sources: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunTable:
    """Runs in calls. U unique rows, R runs.

    calls: in the order in which they are computed.
    rows: (sum of num_runs x length,), int64. the unique row of each row of the calls, back to back; padding repeats the
        last row of its run.
    places: (U,), int64. the place in `rows` from which each unique row has its output.
    parents: (number of runs that start from a state,), int64. for each, call by call, its place among the states that
        its source call kept.
    """

    calls: tuple[RunCall, ...]
    rows: IntArray
    places: IntArray
    parents: IntArray

    @property
    def num_forks(self) -> int:
        """States that are kept."""
        return sum(call.num_runs for call in self.calls if call.keeps)

    def cost(self, rates: RunCost) -> float:
        """What one layer costs with these runs."""
        states = self.num_forks + len(self.parents)
        return sum(rates.of_call(call.num_runs, call.length) for call in self.calls) + states * rates.state
