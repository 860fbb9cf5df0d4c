"""`radixtrain run -- COMMAND`: runs a command, and every model that it loads by `from_pretrained` shares prefixes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from radixtrain.errors import UsageError, handling
from radixtrain.plugins.from_pretrained import LoadedModel
from radixtrain.screen import printable

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOTHING_LOADED = (
    "radixtrain: the command loaded no model by from_pretrained in an environment with both radixtrain and transformers"
)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; 128 + N if signal N ended it."""
    options, command = _parsed(arguments)
    if shutil.which(command[0]) is None:
        raise UsageError(f"radixtrain run: no command {command[0]!r}; after -- write what you would type without it")
    with TemporaryDirectory(prefix="radixtrain-") as folder:
        environment = {
            **os.environ,
            "RADIXTRAIN": "1",
            "RADIXTRAIN_OPTIONS": json.dumps({**options, "reports": folder}),
        }
        code = _wait_for(command, environment)
        for line in _lines(Path(folder)):
            sys.stderr.write(f"{printable(line)}\n")
    return code


def _parsed(arguments: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Parse the options that were given, and the command."""
    parser = argparse.ArgumentParser(
        prog="radixtrain run",
        usage="radixtrain run [options] -- COMMAND ...",
        description="Run a program with every model that it loads by from_pretrained sharing prefixes. The last lines "
        "say for each model what was shared, or why it ran unshared.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--min-ratio", type=float, metavar="1.1", help="a batch with fewer places per unique token runs unshared")
    add("--min-shared-tokens", type=int, metavar="1", help="a branch point that saves fewer tokens gets no branch")
    add("--attention", metavar="auto", help="auto, cascade, path, expand or tree")
    add(
        "--kernel",
        metavar="auto",
        help="auto, torch, flash_attn, flash_attn_3, flash_attn_4, cudnn, efficient or eager",
    )
    add(
        "--allow-dropout",
        action="append",
        metavar="NAME",
        help="a dropout that may draw once for all copies of a token",
    )
    add("--only", action="append", metavar="NAME", help="share this model only: its class, its path, or the path's end")
    add("command", nargs="+", metavar="COMMAND", help="the program and its arguments, after --")
    options = vars(parser.parse_args(arguments))
    return options, options.pop("command")


def _wait_for(command: list[str], environment: dict[str, str]) -> int:
    """Return the exit code. A signal to this process is passed on to the command; Ctrl-C in a terminal reaches both."""
    process = subprocess.Popen(command, env=environment)
    handlers: dict[int, Any] = dict.fromkeys(PASSED_ON, lambda number, _: process.send_signal(number))
    with handling(handlers | {signal.SIGINT: lambda *_: None}):
        code = process.wait()
    return code if code >= 0 else 128 - code


def _lines(folder: Path) -> list[str]:
    """Write a line for each model, over all processes."""
    models: dict[tuple[str, str], LoadedModel] = {}
    for path in sorted(folder.glob("*.json")):
        for fields in json.loads(path.read_text()):
            model = LoadedModel(**fields)
            if (key := (model.name, model.reason)) in models:
                models[key].add(model)
            else:
                models[key] = model
    return [str(model) for model in models.values()] or [NOTHING_LOADED]
