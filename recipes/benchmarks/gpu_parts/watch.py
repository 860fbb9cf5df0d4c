"""A benchmark in a process of its own, begun anew without the part that ended it: a hang, a crash, a lost device.

The watching process imports no torch and opens no device. A part that takes longer than its time prints where it is and
ends its process (`Run.part`); so does a kernel that kills it. What was found until then is on disk, and the parts that
have not begun run in a fresh process.

The JSON file holds all that was found; the Markdown page beside it (`bars.py`) says the same for people. Both are
written anew after every result, into a second file that then takes the place of the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.bars import Result, page

__all__ = ["ENDED", "RUNNING", "Results", "options_of", "watch"]

RUNNING, ENDED = "running", "ended"

STARTED = time.time()  # all that takes long is imported after this file

# Without it torch's deterministic algorithms refuse every matrix product; it is read once, at the first one.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(kw_only=True)
class Results:
    """What was found and left out.

    path: None, or the JSON file; the page has its name, with `.md`.
    header: date, commit, hardware and versions.
    results: part, case and measures. left_out: what was not measured, and why.
    parts: those that have begun, `running` or `ended`.
    """

    path: Path | None = None
    header: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no gradient is wrong."""
        return all(measures.get("passed", True) for _, _, measures in self.results)

    def page(self) -> str:
        return page(self.header, self.results, self.left_out)

    def write(self) -> None:
        if self.path is not None:
            names = ("header", "parts", "results", "left_out")
            _replace(self.path, json.dumps({name: getattr(self, name) for name in names}, indent=1))
            _replace(self.path.with_suffix(".md"), self.page())

    def read(self) -> None:
        """Take over what the file holds, if there is one."""
        if self.path is not None and self.path.exists():
            contents = json.loads(self.path.read_text(encoding="utf-8"))
            self.header, self.parts, self.left_out = (contents[name] for name in ("header", "parts", "left_out"))
            self.results = [(part, case, measures) for part, case, measures in contents["results"]]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def options_of(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add the options that every benchmark of a GPU has."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="shapes that a laptop measures in seconds")
    parser.add_argument("--seconds", type=float, default=400, help="in all, from the start; what was begun is finished")
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--json", type=Path, help="a file to write; the page has its name and ends in .md")
    parser.add_argument("--go_on", action="store_true", help="keep the results that the file has")
    parser.add_argument("--commit", help="of a copy of the tree without git")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # the end, for the process that measures


def watch(script: str, argv: Sequence[str], options: argparse.Namespace) -> int:
    """Run the parts that are asked for. Prints the page, and returns 1 if a gradient is wrong.

    script, argv: the benchmark and its options; `--until`, `--parts` and `--json` are added.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Results(path=options.json or Path(folder) / "results.json")
        if options.go_on:
            results.read()
        results.parts = {}
        results.write()
        added = [f"--json={results.path}", f"--until={STARTED + options.seconds}"]
        code = _run_all(results, [sys.executable, script, *argv, *added], options.parts)
        print(results.page())
        return code or int(not results.passed)


def _run_all(results: Results, command: Sequence[str], parts: Sequence[str]) -> int:
    """A process for the parts, and another one after each that ends early. Returns the code of one that began none."""
    environment = {**DETERMINISTIC, **os.environ}
    left = list(parts)
    while left:
        code = subprocess.run([*command, "--parts", *left], env=environment, check=False).returncode
        results.read()
        for name in [name for name, state in results.parts.items() if state == RUNNING]:
            results.parts[name] = ENDED
            results.left_out.append(f"{name}: its process ended with code {code}, by a hang or a crash")
        results.write()
        if not any(name in results.parts for name in left):
            return code or 1
        left = [name for name in left if name not in results.parts]
    return 0
