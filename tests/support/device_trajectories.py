"""How far a run is from another that took the same steps: weights and moments by tensor, metrics by step."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from radixtrain.checkpoints.choice import newest_valid
from radixtrain.checkpoints.folder import read_checkpoint

__all__ = ["LOSSES", "WEIGHTS", "assert_same_trajectory", "distances", "metrics", "trained"]

WEIGHTS = 1e-6  # of a tensor: the largest difference over the largest magnitude, in float32
LOSSES = 2e-6  # of a step, absolute; they are logged as float32
RELATIVE = ("grad_norm",)  # metrics whose bar is relative, and MOMENTS
MOMENTS = 1e-5  # of AdamW, as weights: an update divides them by each other, so they are rounded less
COMPARED = ("loss", "eval_loss", "grad_norm")


def trained(folder: Path) -> dict[str, Tensor]:
    """The tensors of `model/`."""
    found: dict[str, Tensor] = {}
    for path in sorted((folder / "model").glob("*.safetensors")):
        found |= load_file(path)
    assert found, f"{folder} holds no model"
    return found


def moments(folder: Path) -> dict[str, Tensor]:
    """The state of AdamW in the last checkpoint."""
    path = newest_valid(folder / "checkpoints").path
    assert path is not None, folder
    (state,) = read_checkpoint(path)["optimizer_states"]
    return {f"{name} {number}": x for number, each in state["state"].items() for name, x in each.items()}


def distances(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """By tensor: the largest difference, relative to the largest magnitude in `other`."""
    assert one.keys() == other.keys()
    found: dict[str, float] = {}
    for name, expected in other.items():
        assert one[name].dtype == expected.dtype and one[name].shape == expected.shape, name
        largest = (one[name].double() - expected.double()).abs().max()
        found[name] = float(largest / expected.double().abs().max().clamp_min(1e-300))
    return found


def metrics(folder: Path, *names: str) -> dict[tuple[str, int], float]:
    """By name and step, of all parts of a run; a later part replaces an earlier one."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted(folder.glob("logs/version_*/metrics.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                found |= {(name, int(row["step"])): float(row[name]) for name in names if row.get(name)}
    return found


def assert_same_trajectory(folder: Path, whole: Path, since: int = 0, weights: float = WEIGHTS) -> str:
    """The steps of a run are those of another, to rounding. Returns the largest differences, as a line to print.

    since: the step from which on the run has logged. weights: their bar.
    """
    here = metrics(folder, *COMPARED)
    there = {place: value for place, value in metrics(whole, *COMPARED).items() if place[1] >= since}
    assert here.keys() == there.keys() and here, f"{sorted(here.keys() ^ there.keys())} in only one of them"
    losses = {place: abs(here[place] - there[place]) for place in there if place[0] not in RELATIVE}
    norms = {place: abs(here[place] / there[place] - 1) for place in there if place[0] in RELATIVE}
    found = [
        ("weights", distances(trained(folder), trained(whole)), weights),
        ("moments", distances(moments(folder), moments(whole)), MOMENTS),
        ("losses", losses, LOSSES),
        ("norms", norms, MOMENTS),
    ]
    worst = [(name, max((size, str(place)) for place, size in sizes.items()), bar) for name, sizes, bar in found]
    told = ", ".join(f"{name} {size:.1e} ({place})" for name, (size, place), _ in worst)
    assert all(size <= bar for _, (size, _), bar in worst), told
    return told
