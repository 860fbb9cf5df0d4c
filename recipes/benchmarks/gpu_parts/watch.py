"""A benchmark in a process of its own, begun anew without the part that ended it: a hang, a crash, a device that is gone.

The watching process imports no torch and opens no device. A part that takes longer than its time prints where it is and
ends its process (`Run.part`); so does a kernel that kills it. What was found until then is on disk, and the parts that
have not begun run in a fresh process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.results import ENDED, RUNNING, Results

__all__ = ["watch"]

RECIPES = Path(__file__).resolve().parents[2]  # where `triton_kernels` is, which a part imports if it is there


def watch(script: str, argv: Sequence[str], parts: Sequence[str], until: float, path: Path | None, go_on: bool) -> int:
    """Run the parts. Prints the page, and returns 1 if a gradient is wrong or a process began nothing.

    script, argv: the benchmark and its options; `--until`, `--parts` and `--json` are added.
    until: the second at which it has to end, of `time.time()`.
    path: the JSON file to write, or None. go_on: keep what it holds.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Results(path=path or Path(folder) / "results.json")
        if go_on:
            results.read()
        results.parts = {}
        results.write()
        code = _run_all(results, [sys.executable, script, *argv, f"--json={results.path}", f"--until={until}"], parts)
        print(results.page())
        return code or int(not results.passed)


def _run_all(results: Results, command: Sequence[str], parts: Sequence[str]) -> int:
    """A process for the parts, and another one after each that ends early. Returns the code of one that began none."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(RECIPES)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
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


