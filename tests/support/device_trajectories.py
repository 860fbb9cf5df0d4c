"""How far a run is from another that took the same steps: weights and moments by tensor, metrics by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outcomes import values
from safetensors.torch import load_file
from torch import Tensor

from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.checkpoints.resolve import newest_valid

__all__ = ["BAR", "assert_same_trajectory", "metrics"]

# Between two runs in float64 (`changed_runs.FLOAT64`) that add in another order: twelve steps leave 2e-14 at the most.
BAR = 1e-10
COMPARED = ("loss", "eval_loss", "grad_norm")


def assert_same_trajectory(folder: Path, whole: Path, since: int = 0) -> str:
    """The steps of a run are those of another, to rounding. Returns the largest differences, as a line to print.

    since: the step after which the run has logged.
    """
    here = metrics(folder, *COMPARED)
    there = {place: value for place, value in metrics(whole, *COMPARED).items() if place[1] > since}
    assert here.keys() == there.keys() and here, f"{sorted(here.keys() ^ there.keys())} in only one of them"
    found = {
        "weights": distances(trained(folder), trained(whole)),
        "moments": distances(moments(folder), moments(whole)),
        "metrics": {str(place): abs(here[place] / there[place] - 1) for place in there},
    }
    worst = {name: max((size, place) for place, size in sizes.items()) for name, sizes in found.items()}
    told = ", ".join(f"{name} {size:.1e} ({place})" for name, (size, place) in worst.items())
    assert all(size <= BAR for size, _ in worst.values()), told
    return told


def metrics(folder: Path, *names: str) -> dict[tuple[str, int], float]:
    """By name and step, of all parts of a run."""
    return {place: float(text) for place, text in values(folder).items() if place[0] in names}


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
    return read_checkpoint(path).moments


def distances(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """By tensor: the largest difference, relative to the largest magnitude in `other`."""
    assert one.keys() == other.keys()
    found: dict[str, float] = {}
    for name, expected in other.items():
        assert one[name].dtype == expected.dtype and one[name].shape == expected.shape, name
        largest = (one[name].double() - expected.double()).abs().max()
        found[name] = float(largest / expected.double().abs().max().clamp_min(1e-300))
    return found
