"""The runs of a recurrent layer as tensors, beside the `TreeLayout` of the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.run_choice import cheapest_runs
from radixtrain.tree.runs import RunCall, RunCost, RunTable

__all__ = ["RUNS", "RunLayout"]

RUNS = "radix_runs_"  # begins the keys of the runs in a batch


@dataclass(frozen=True, eq=False, kw_only=True)
class RunLayout:
    """A `RunTable` on a device: `calls` are host ints, the others int64 tensors of the same shapes."""

    calls: tuple[RunCall, ...]
    rows: Tensor
    places: Tensor
    parents: Tensor

    @property
    def num_forks(self) -> int:
        """States that are kept."""
        return sum(call.num_runs for call in self.calls if call.keeps)

    @classmethod
    def from_segments(cls, starts: IntArray, parents: IntArray, rates: RunCost | None = None) -> RunLayout:
        """The cheapest runs of a plan with these segments, as CPU tensors. Runs in the DataLoader worker."""
        return cls.from_table(cheapest_runs(starts, parents, rates))

    @classmethod
    def from_table(cls, table: RunTable) -> RunLayout:
        """As CPU tensors that share the memory of the table."""
        return cls(
            calls=table.calls,
            rows=torch.from_numpy(table.rows),
            places=torch.from_numpy(table.places),
            parents=torch.from_numpy(table.parents),
        )

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> RunLayout:
        """From the entries of a batch. KeyError names a missing one."""
        values = {name: batch[RUNS + name] for name in ("calls", "rows", "places", "parents")}
        calls = tuple(
            RunCall(num_runs, length, keeps, tuple((call, number) for call, number in sources))
            for num_runs, length, keeps, sources in values["calls"]
        )
        return cls(**{**values, "calls": calls})

    def to_batch(self) -> dict[str, Any]:
        """The entries of a batch: tensors, and for `radix_runs_calls` nested tuples of ints."""
        tensors = {RUNS + name: getattr(self, name) for name in ("rows", "places", "parents")}
        return {RUNS + "calls": tuple(tuple(call) for call in self.calls), **tensors}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RunLayout:
        """The same runs with their tensors on a device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking) for name in ("rows", "places", "parents")
        }
        return replace(self, **moved)
