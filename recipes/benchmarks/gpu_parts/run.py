"""One run of the GPU's benchmark: its clock, what it found and left out, and two files that are whole at any second.

The JSON file holds all that was found; the Markdown page beside it (`bars.py`) says the same for people. Both are
written anew after every result, into a second file that then takes the place of the first: a run that is killed leaves
what it had found.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu_parts.bars import page, shown

from radixtrain.bench.environment import environment
from radixtrain.timing import seconds_of

__all__ = ["Run", "facts", "median_seconds"]

DEVICE_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4")


@dataclass
class Run:
    """What to measure on, how much time is left, and what was found.

    seconds: for all parts together. deadline: of the part that runs, by the clock.
    header: date, commit, hardware and versions.
    path: None, or the JSON file to write; the page has its name, with `.md`.
    results: part, case and measures. left_out: what was not measured, and why.
    """

    device: torch.device
    seconds: float
    header: dict[str, Any]
    path: Path | None = None
    start: float = field(default_factory=time.perf_counter)
    deadline: float = float("inf")
    results: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_passed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def seconds_left(self) -> float:
        """Of the part, or of the run."""
        return min(self.start + self.seconds, self.deadline) - time.perf_counter()

    @contextmanager
    def part(self, name: str, share: float) -> Iterator[None]:
        """Inside, `share` of the seconds that are left are there. Whatever a part raises is left out, by its name."""
        self.deadline = time.perf_counter() + share * (self.seconds - self.seconds_passed)
        try:
            yield
        except Exception as error:  # the other parts are still to be measured
            self.leave_out(name, f"{type(error).__name__}: {error}")
        finally:
            self.deadline = float("inf")

    def found(self, part: str, case: str, **measures: Any) -> None:
        self.results.append((part, case, measures))
        self._say(f"{part}: {case}: " + ", ".join(f"{name} {shown(value)}" for name, value in measures.items()))

    def leave_out(self, what: str, why: object) -> None:
        self.left_out.append(f"{what}: {str(why).splitlines()[0] if str(why) else type(why).__name__}")
        self._say(f"left out: {self.left_out[-1]}")

    def has_time(self, what: str, needed: float = 0.0) -> bool:
        if self.seconds_left > needed:
            return True
        self.leave_out(what, f"{max(0.0, self.seconds_left):.0f} of {self.seconds:.0f} seconds were left for it")
        return False

    def page(self) -> str:
        return page(self.header, self.results, self.left_out)

    def write(self) -> None:
        if self.path is not None:
            contents = {"header": self.header, "results": self.results, "left_out": self.left_out}
            _replace(self.path, json.dumps(contents, indent=1))
            _replace(self.path.with_suffix(".md"), self.page())

    def read(self) -> None:
        """Take over the results of the file, if there is one."""
        if self.path is not None and self.path.exists():
            contents = json.loads(self.path.read_text(encoding="utf-8"))
            self.results = [(part, case, measures) for part, case, measures in contents["results"]]
            self.left_out = contents["left_out"]

    def _say(self, line: str) -> None:
        print(f"[{self.seconds_passed:4.0f} s] {line}", flush=True)
        self.write()


def median_seconds(call: Callable[[], Any], device: torch.device, at_least: float = 0.02, rounds: int = 5) -> float:
    """Of one call: the median of some rounds of at least so many seconds; shorter rounds do not count."""
    number, took = 1, list[float]()
    while len(took) < rounds:
        seconds = seconds_of(lambda times=number: [call() for _ in range(times)], device)  # type: ignore[misc]
        if seconds < at_least and number < 1000:
            number, took = number * 4, []
        else:
            took.append(seconds / number)
    return statistics.median(took)


def facts(device: torch.device) -> dict[str, Any]:
    """Date, commit, hardware and versions."""
    known = environment(device, "bfloat16")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known |= {"gpu_memory_gigabytes": round(properties.total_memory / 1e9, 1), "cuda": torch.version.cuda}
        known["compute_capability"] = f"{properties.major}.{properties.minor}"
    return {**known, **{package: _version(package) for package in DEVICE_PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
