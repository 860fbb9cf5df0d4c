"""Recipes as scripts in forked processes: `run_script` runs where everything is imported, in a run of a `Server`."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["run_script"]


def run_script(path: str, arguments: Sequence[str]) -> None:
    """`python path arguments` in the project's folder; each `python -m radixtrain` that the script runs is forked too.

    On one thread: a fork does not have the threads of its parent, and OpenMP would wait for them.
    """
    import torch

    torch.set_num_threads(1)
    os.chdir(Path(__file__).resolve().parents[2])
    subprocess.run = _run_forked  # type: ignore[assignment]
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).parent.resolve())
    runpy.run_path(path, run_name="__main__")


def _run_forked(command: Sequence[str], check: bool) -> Any:
    """What recipes use of `subprocess.run`."""
    assert list(command[:3]) == [sys.executable, "-m", "radixtrain"] and check
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        from radixtrain.__main__ import main

        sys.path[0] = ""
        sys.argv = ["radixtrain", *command[3:]]
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise subprocess.CalledProcessError(code, command)
