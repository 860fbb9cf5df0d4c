"""One run of a benchmark on a device: its clock, its parts, and what it found.

Every part has a watchdog: if it takes longer than its time and `GRACE` seconds more, where it is goes to stderr and the
process ends. A kernel that never returns cannot be stopped in any other way; `watch.py` goes on with the other parts.
"""

import argparse
import faulthandler
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from gpu_parts.bars import shown
from gpu_parts.watch import ENDED, RUNNING, Results
from step import environment

from radixtrain.errors import UserError
from radixtrain.timing import seconds_of

__all__ = ["Run", "measure", "median_seconds", "optional", "run_parts"]

GRACE = 30  # seconds for a result that was begun
DEVICE_PACKAGES = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "liger-kernel",
    "trl",
)


@dataclass(kw_only=True)
class Run(Results):
    """What to measure on, how much time is left, and what was found.

    seconds: for all parts together. deadline: of the part that runs, by the clock.
    """

    device: torch.device
    seconds: float
    start: float = field(default_factory=time.perf_counter)
    deadline: float = float("inf")

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
        seconds = max(0.0, share * (self.seconds - self.seconds_passed))
        self.deadline = time.perf_counter() + seconds
        self.parts[name] = RUNNING
        self.write()
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
        try:
            yield
        except Exception as error:  # the other parts are still to be measured
            self.leave_out(name, f"{type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.parts[name], self.deadline = ENDED, float("inf")
            self.write()

    def found(self, part: str, case: str, **measures: Any) -> None:
        self.results.append((part, case, measures))
        self._say(f"{part}: {case}: " + ", ".join(f"{name} {shown(value)}" for name, value in measures.items()))

    def leave_out(self, what: str, why: object) -> None:
        """Once: the same arm is missing in every step."""
        line = f"{what}: {str(why).splitlines()[0] if str(why) else type(why).__name__}"
        if line not in self.left_out:
            self.left_out.append(line)
            self._say(f"left out: {line}")

    def has_time(self, what: str, needed: float = 0.0) -> bool:
        if self.seconds_left > needed:
            return True
        self.leave_out(what, f"{max(0.0, self.seconds_left):.0f} of {self.seconds:.0f} seconds were left for it")
        return False

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


def optional(name: str) -> Any:
    """A module that is measured if it is there. Raises UserError if it is not, for the list of what was left out."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is not there: {error}") from None


def measure(
    options: argparse.Namespace,
    part_seconds: Mapping[str, float],
    calls: Callable[[Run, argparse.Namespace], Mapping[str, Callable[[], None]]],
) -> int:
    """Measure the parts that are asked for, until `options.until`. Returns 1 without the device.

    part_seconds: what each should take, for its share of the time. calls: makes the parts, by name.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; --device cpu --tiny runs the same code", file=sys.stderr)
        return 1
    run = run_of(options)
    run_parts(run, calls(run, options), options.parts, part_seconds)
    return 0


def run_of(options: argparse.Namespace) -> Run:
    """The run, which goes on with what its file holds."""
    device = torch.device(options.device)
    run = Run(path=options.json, device=device, seconds=max(0.0, options.until - time.time()))
    run.read()
    run.header |= {**facts(device), "shapes": "tiny" if options.tiny else "Qwen3"}
    run.header["commit"] = options.commit or run.header["commit"]
    print(", ".join(f"{name} {value}" for name, value in run.header.items()), flush=True)
    return run


def run_parts(
    run: Run, parts: Mapping[str, Callable[[], None]], names: Sequence[str], part_seconds: Mapping[str, float]
) -> None:
    """The parts of these names, each with its share of the time, until the device is gone."""
    for number, name in enumerate(names):
        with run.part(name, part_seconds[name] / sum(part_seconds[each] for each in names[number:])):
            parts[name]()
        if not device_works(run.device):
            return run.leave_out("this process", "the device does not answer any more")
    return None


def device_works(device: torch.device) -> bool:
    """Some errors of a kernel leave the process without its device. Frees what the parts before have held."""
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return float(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False
