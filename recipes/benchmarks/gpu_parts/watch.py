"""A benchmark in a process of its own, begun anew without the part that ended it: a hang, a crash, a lost device.

The watching process imports no torch and opens no device. A part that takes longer than its time prints where it is and
ends its process (`Run.part`); so does a kernel that kills it. What was found until then is on disk, and the parts that
have not begun run in a fresh process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.results import ENDED, RUNNING, Results

__all__ = ["options_of", "watch"]

STARTED = time.time()  # all that takes long is imported after this file

# Without it torch's deterministic algorithms refuse every matrix product; it is read once, at the first one.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


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
