"""What a run has left behind: whether it is, bit for bit, what an uninterrupted run leaves, and nothing else.

A checkpoint of somebody else's making: its state is changed, and its checksums are right again.

How far a run is from another that took the same steps: weights and moments by tensor, metrics by step.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from radixtrain.checkpoints.atomic import WRITTEN
from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.checkpoints.manifest import Manifest
from radixtrain.checkpoints.resolve import newest_valid
from radixtrain.checkpoints.tensors import digest_of_file

# Else a run that is killed before its first checkpoint measures again what is fastest, and may choose another order of
# sums.
EXACT = {"trainer__deterministic": "true"}
TIMED = ("tokens_per_second", "computed_tokens_per_second")
COMPARED = ("global_step", "state_dict", "optimizer_states")


def logged(folder: Path, column: str = "loss", version: int = 0) -> dict[int, float]:
    """A column of the CSV logger by step, of one part of a run."""
    with (folder / "logs" / f"version_{version}" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row[column]}


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def names(folder: Path) -> list[str]:
    """Without the list of what radixtrain has written there."""
    return sorted(path.name for path in folder.iterdir() if path.name != WRITTEN)


def values(folder: Path) -> dict[tuple[str, int], str]:
    """Every metric of a run by name and step, as it is written. AssertionError if two of its parts differ."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(folder.glob("logs/version_*/metrics.csv")):
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("step")]
        for row in rows:
            for name, text in row.items():
                if text and name not in ("step", *TIMED):
                    place = name, int(row["step"])
                    assert found.setdefault(place, text) == text, f"{path}: {place} is {text}, was {found[place]}"
    return found


def assert_same_run(folder: Path, whole: Path, since: int = 0) -> None:
    """The metrics, the model and the last checkpoint of a run are those of the uninterrupted one.

    since: the step after which the run has logged.
    """
    here, there = values(folder), {place: text for place, text in values(whole).items() if place[1] > since}
    differing = {place: (here.get(place), text) for place, text in there.items() if here.get(place) != text}
    assert not differing, f"of {len(there)} values: {dict(list(differing.items())[:5])}"
    assert here.keys() == there.keys()
    assert_same_model(folder, whole)
    last = [newest_valid(each / "checkpoints").path for each in (folder, whole)]
    if None not in last:
        assert_same_state(*last)


def assert_same_model(folder: Path, whole: Path) -> None:
    names = [{path.name for path in (each / "model").iterdir()} for each in (folder, whole)]
    assert names[0] == names[1]
    for name in sorted(names[0]):
        if name.endswith(".safetensors"):
            assert (folder / "model" / name).read_bytes() == (whole / "model" / name).read_bytes(), name


def assert_same_state(one: Path, other: Path) -> None:
    """Weights, optimizer, schedule, position, random generators and skipped steps of two checkpoints."""
    first, second = read_checkpoint(one), read_checkpoint(other)
    for name in COMPARED:
        assert_equal(first[name], second[name], name)
    for name in ("position", "generators", "skipped"):
        assert_equal(first["radixtrain"][name], second["radixtrain"][name], name)


def assert_equal(one: Any, other: Any, name: str) -> None:
    """Nested values with tensors in them. The message names the first that differs."""
    assert type(one) is type(other), name
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), name
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_equal(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), name
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{name}[{place}]")
    else:
        assert one == other, name


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step=")) for path in (folder / "checkpoints").glob("step=*"))


def num_batches(checkpoint: Path) -> int:
    """Until a checkpoint; they are what a logger counts by."""
    return state_of(checkpoint)["position"]["num_batches"]


def state_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())["radixtrain"]


def conclusions(folder: Path) -> dict[str, Any]:
    """Of the weights in `model/`, of the best ones, why the run ended, and the steps that were left out."""
    found = summary(folder)
    best = {key: value for key, value in (found["best"] or {}).items() if key != "path"}
    skipped = state_of(folder / "checkpoints" / "last")["skipped"]
    return {"best": best, "exported": found["exported"], "ended": found["ended"]["reason"], **skipped}


def assert_nothing_left(folder: Path, *temporary: Path) -> None:
    """No lock, staging or set-aside folder in a run's folder, and nothing at all in its temporary folders."""
    hidden = [
        path
        for path in folder.rglob("*")
        if (path.name.startswith(".") and path.name != WRITTEN) or ".partial" in path.name
    ]
    assert not hidden, hidden
    for each in temporary:
        assert not [*each.rglob("*")], [*each.rglob("*")]


def forge(checkpoint: Path, place: tuple[Any, ...], value: Any) -> None:
    """Write a value into the state, at a place: keys and positions from its root."""
    path = checkpoint / "state.json"
    state = entry = json.loads(path.read_text())
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    path.write_text(json.dumps(state))
    manifest = Manifest.read(checkpoint)
    manifest.files["state.json"] = digest_of_file(path)
    (checkpoint / "manifest.json").write_bytes(manifest.to_bytes())


# Between two runs in float64 (`changed_runs.FLOAT64`) that add in another order: twelve steps leave 2e-14 at the most.
BAR = 1e-10
METRICS = ("loss", "eval_loss", "grad_norm")


def assert_same_trajectory(folder: Path, whole: Path, since: int = 0) -> str:
    """The steps of a run are those of another, to rounding. Returns the largest differences, as a line to print.

    since: the step after which the run has logged.
    """
    here = metrics(folder, *METRICS)
    there = {place: value for place, value in metrics(whole, *METRICS).items() if place[1] > since}
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
