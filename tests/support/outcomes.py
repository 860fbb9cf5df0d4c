"""What a run has left behind: whether it is, bit for bit, what an uninterrupted run leaves, and nothing else."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from radixtrain.checkpoints.atomic import WRITTEN
from radixtrain.checkpoints.folder import read_checkpoint, read_run
from radixtrain.checkpoints.resolve import newest_valid

__all__ = [
    *("EXACT", "assert_equal", "assert_nothing_left", "assert_same_run", "assert_same_state", "conclusions"),
    *("logged", "names", "num_batches", "steps_saved", "summary", "values"),
]

# Else a run that is killed before its first checkpoint measures again what is fastest, and may choose another order of
# sums.
EXACT = {"trainer__deterministic": "true"}
TIMED = ("tokens_per_second", "computed_tokens_per_second")
COMPARED = ("step", "num_skipped", "position", "generators", "numbers")


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
    """Weights, optimizer, position, random generators and skipped steps of two checkpoints."""
    first, second = read_checkpoint(one), read_checkpoint(other)
    for name in ("weights", "moments"):
        assert_equal(getattr(first, name), getattr(second, name), name)
    for name in COMPARED:
        assert first.run[name] == second.run[name], name


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
    return int(read_run(checkpoint)["position"]["num_batches"])


def conclusions(folder: Path) -> dict[str, Any]:
    """Of the weights in `model/`, of the best ones, why the run ended, and the steps that were left out."""
    found = summary(folder)
    best = {key: value for key, value in (found["best"] or {}).items() if key != "path"}
    skipped = read_run(folder / "checkpoints" / "last")["num_skipped"]
    return {"best": best, "exported": found["exported"], "ended": found["ended"]["reason"], "num_skipped": skipped}


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
