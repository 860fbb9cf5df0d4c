"""What a run of `fit` leaves behind, and deaths in the middle of it."""

from __future__ import annotations

import csv
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from radixtrain.checkpoints.atomic import WRITTEN
from radixtrain.checkpoints.folder import CHECKSUMS, FILES, RUN, Checkpoint, read_checkpoint, write_checkpoint
from radixtrain.checkpoints.resolve import newest_valid
from radixtrain.checkpoints.tensors import digest_of_file
from radixtrain.distributed import ranks
from radixtrain.errors import Stopped
from radixtrain.training.fault_tolerance.run_state import Position
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from tests.support import tries

# What a run has left behind: whether it is, bit for bit, what an uninterrupted run leaves, and nothing else.


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


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A file with a line of JSON for each row; a row that is text is a line as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def rows_in(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def errors_in(said: str) -> list[str]:
    """What each line of an error says."""
    return [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file, however deep."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


# How far a run is from another that took the same steps: weights and moments by tensor, metrics by step.


# Between two runs in float64 (`processes.FLOAT64`) that add in another order: twelve steps leave 2e-14 at the most.
BAR = 1e-10
COMPARED_METRICS = ("loss", "eval_loss", "grad_norm")


def assert_same_trajectory(folder: Path, whole: Path, since: int = 0) -> str:
    """The steps of a run are those of another, to rounding. Returns the largest differences, as a line to print.

    since: the step after which the run has logged.
    """
    here = metrics(folder, *COMPARED_METRICS)
    there = {place: value for place, value in metrics(whole, *COMPARED_METRICS).items() if place[1] > since}
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


# Checkpoints of somebody else's making: of little content, or changed so that their checksums are right again.


def a_run(step: int = 3, **changed: Any) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, as `checkpoint_of` makes it."""
    position = {"num_batches": step, "num_steps": step, "validation_pending": False}
    made = {"version": "0", "step": step, "num_skipped": 0, "position": position, "rows": {}, "generators": []}
    settings = {"numbers": {}, "model": {}, "data": {}, "config": {}, "base": None, "record": {}, "wandb_run": ""}
    return {**made, **settings, **changed}


def forge(checkpoint: Path, place: tuple[Any, ...], value: Any) -> None:
    """Write a value into the run, at a place: keys and positions from its root."""
    path = checkpoint / RUN
    run = entry = json.loads(path.read_text())
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    path.write_text(json.dumps(run))
    sign(checkpoint)


def sign(checkpoint: Path) -> None:
    """Write the checksums that its files have now."""
    lines = (f"{digest_of_file(checkpoint / name).xxh3_128}  {name}\n" for name in FILES)
    (checkpoint / CHECKSUMS).write_text("".join(lines))


# A trainer whose steps only count, around `SaveCheckpoints`: fast enough to try every order of steps and requests.


class CountingTrainer:
    """What `SaveCheckpoints` uses of `Loop` and of `RadixModule`, and real requests. options: of `SaveCheckpoints`."""

    def __init__(self, folder: Path, **options: Any):
        self.requests = Requests()
        self.saver = SaveCheckpoints(folder / "checkpoints", self.requests, **options)
        self.module: Any = torch.nn.Linear(2, 2)
        self.module.position, self.module.is_stepping = Position(0, 0), False
        self.validating = False

    def save_checkpoint(self, path: Path) -> None:
        position = self.module.position
        checkpoint = Checkpoint({}, {}, a_run(position.num_steps, position=asdict(position)))
        ranks().broadcast_from_rank0(lambda: write_checkpoint(path, checkpoint))

    def start(self) -> CountingTrainer:
        self.saver.started(self.module)
        return self

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.saver.between_steps(self, self.module)
            done = self.module.position.num_batches + 1
            self.module.position = Position(done, done)

    def fail(self, error: BaseException) -> None:
        self.saver.failed(self, self.module, error)

    def run(self, before: Any) -> tuple[str, int]:
        """Three steps, then `before`, then three more: how it is stopped."""
        try:
            with self.requests, self.requests.deferred():
                self.start().steps(3)
                before()
                self.steps(3)
        except Stopped as stopped:
            return str(stopped), stopped.code
        return "done", 0


def written(folder: Path) -> list[str]:
    """The names of the checkpoints of a run."""
    places = [*folder.glob("checkpoints/*")]
    return sorted(path.name for path in places if not path.is_symlink())


# Work that dies in a fork as by `kill -9`: before an operation on files, or anywhere between two calls of C functions.
#
#     for _ in kills_at_file_operations(lambda: replace(folder, "new")):
#         assert content(folder) in ("old", "new")
#         replace(folder, "old")
#
# The work is first run to its end, which counts the places, so the body of the loop finds it finished once.


KILLED = 9
OPERATIONS = ("os.", "open", "shutil.", "ctypes.dlopen")  # audit events; the last one is renameat2
Watch = Callable[[Callable[[], None]], None]


def kills_at_file_operations(work: Callable[[], object], events: Sequence[str] = OPERATIONS) -> Iterator[None]:
    """Yields after each death: before every operation in `make test-full`, before every fifth in `make test`.

    events: beginnings of the names of audit events.
    """

    def watch(reached: Callable[[], None]) -> None:
        sys.addaudithook(lambda event, _: reached() if event.startswith(tuple(events)) else None)

    return _kills(work, watch, lambda total: range(0, total, total // tries(total, total)))


def kills_at_calls(work: Callable[[], object], number: int) -> Iterator[None]:
    """Yields after each death, at `number` random places in `make test-full`: also in the middle of a file's bytes."""

    def watch(reached: Callable[[], None]) -> None:
        sys.setprofile(lambda frame, event, _: reached() if event == "c_call" else None)

    return _kills(work, watch, lambda total: random.Random(1).sample(range(total), tries(number, total)))


def _kills(work: Callable[[], object], watch: Watch, places: Callable[[int], Sequence[int]]) -> Iterator[None]:
    total = _run(work, watch, sys.maxsize)
    assert total is not None and total > 10  # it does count
    yield
    for place in places(total):
        assert _run(work, watch, place) is None, f"it ended before place {place} of {total}"
        yield


def _run(work: Callable[[], object], watch: Watch, place: int) -> int | None:
    """The number of places that the work has; None if it was killed at one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def reached() -> None:
            nonlocal seen
            if seen == place:
                os._exit(KILLED)
            seen += 1

        try:
            watch(reached)
            work()
            sys.setprofile(None)
            os.write(write, str(seen).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        told = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (code == KILLED) != bool(told), f"exit code {code}"  # no other end, such as an error of the work
    return int(told) if told else None
