"""One run of the GPU's benchmark: its clock, what it found and left out, and two files that are whole at any second.

The CSV file has `#` lines for the machine, the date and what was left out, then a line for each measure. The Markdown
page beside it (`page.py`) says the same for people. Both are written anew after every result, into a second file
that then takes the place of the first: a run that is killed leaves what it had found.
"""

import csv
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_parts.page import page

from radixtrain.bench.environment import environment

__all__ = ["Result", "Run", "facts", "read_csv", "seconds_of", "shown", "write_csv"]

DEVICE_PACKAGES = ("triton", "flash-attn", "flash-attn-3")
LEFT_OUT = "left out"
WORDS = {"True": True, "False": False}


class Result(NamedTuple):
    part: str
    case: str
    measures: dict[str, Any]


@dataclass
class Run:
    """What to measure on, how much time is left, and what was found.

    seconds: for all parts together.
    header: date, commit, hardware and versions.
    csv: None, or the file to write; the page has its name, with `.md`.
    start: by the clock.
    deadline: of the part that runs, by the clock.
    left_out: what was not measured, and why.
    """

    device: torch.device
    seconds: float
    header: dict[str, Any]
    csv: Path | None = None
    start: float = field(default_factory=time.perf_counter)
    deadline: float = float("inf")
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Of the part, or of the run."""
        return min(self.start + self.seconds, self.deadline) - time.perf_counter()

    @property
    def seconds_passed(self) -> float:
        return time.perf_counter() - self.start

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
        self.results.append(Result(part, case, measures))
        self.say(f"{part}: {case}: " + ", ".join(f"{name} {shown(value)}" for name, value in measures.items()))

    def leave_out(self, what: str, why: object) -> None:
        self.left_out.append(f"{what}: {str(why).splitlines()[0] if str(why) else type(why).__name__}")
        self.say(f"{LEFT_OUT}: {self.left_out[-1]}")

    def say(self, line: str) -> None:
        print(f"[{self.seconds_passed:4.0f} s] {line}", flush=True)
        self.write()

    def write(self) -> None:
        if self.csv is not None:
            write_csv(self.csv, self)
            _replace(self.csv.with_suffix(".md"), page(self.header, self.results, self.left_out))

    def has_time(self, what: str, needed: float = 0.0) -> bool:
        if self.seconds_left > needed:
            return True
        self.leave_out(what, f"{max(0.0, self.seconds_left):.0f} of {self.seconds:.0f} seconds were left for it")
        return False


def seconds_of(call: Callable[[], Any], device: torch.device, at_least: float = 0.02, rounds: int = 5) -> float:
    """Of one call: the median of some rounds of at least so many seconds; shorter rounds do not count."""
    number, took = 1, list[float]()
    while len(took) < rounds:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        wait_for(device)
        seconds = time.perf_counter() - start
        if seconds < at_least and number < 1000:
            number, took = number * 4, []
        else:
            took.append(seconds / number)
    return statistics.median(took)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts(device: torch.device) -> dict[str, Any]:
    """Date, commit, hardware and versions."""
    found = environment(device, "bfloat16")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu_memory_gigabytes": round(properties.total_memory / 1e9, 1), "cuda": torch.version.cuda}
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
    return {**found, **{package: _version(package) for package in DEVICE_PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def write_csv(path: Path, run: Run) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in run.header.items())
        file.writelines(f"# {LEFT_OUT}: {line}\n" for line in run.left_out)
        writer = csv.writer(file)
        writer.writerow(["part", "case", "measure", "value"])
        writer.writerows((part, case, *pair) for part, case, measures in run.results for pair in measures.items())
    os.replace(partial, path)


def read_csv(path: Path) -> tuple[list[Result], list[str]]:
    """The results and what was left out, of a file of `write_csv`."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for part, case, measure, value in list(csv.reader(line for line in lines if not line.startswith("# ")))[1:]:
        results.setdefault((part, case), {})[measure] = _value(value)
    left_out = [line.split(": ", 1)[1] for line in lines if line.startswith(f"# {LEFT_OUT}: ")]
    return [Result(*names, measures) for names, measures in results.items()], left_out


def _value(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return WORDS.get(text, text)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
