"""`radixtrain doctor`: can training run here, what is missing, and the command that gets it."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from radixtrain.commands.findings import Finding, findings
from radixtrain.errors import UserError

__all__ = ["doctor", "run"]

WIDTH = 24  # of the names


def doctor(json: bool = False) -> None:
    """Print versions, devices, the attention that would run, room, caches and logins, and what is wrong with them.

    Args:
        json: one JSON object for machines in place of the text for people.

    Raises:
        UserError: training cannot run here, or should not: a package is missing, or has a hole that is known.
    """
    found = findings()
    blocking = [finding for finding in found if finding.blocks]
    if json:
        entries = [finding._asdict() for finding in found]
        print(json_format.dumps({"can_train": not blocking, "findings": entries}, indent=2))  # noqa: T201
    else:
        print(_text(found))  # noqa: T201
    if blocking:
        told = "; ".join(f"{each.name} {each.value}: {each.problem}: {each.fix}" for each in blocking)
        raise UserError(f"training cannot run here: {told}")


def run(argv: Sequence[str]) -> None:
    """The command line of `doctor`."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="radixtrain doctor", exit_on_error=False)
    parser.add_function_arguments(doctor)
    options: dict[str, Any] = parser.parse_args(list(argv)[1:]).as_dict()
    doctor(**options)


def _text(found: Sequence[Finding]) -> str:
    """A paragraph for each section, and a last line."""
    lines = []
    for section, group in groupby(found, key=lambda finding: finding.section):
        lines += [section, *(line for finding in group for line in _lines(finding)), ""]
    if not any(finding.blocks for finding in found):
        lines.append("Training can run here. `radixtrain verify` compares its gradient with the ordinary one.")
    return "\n".join(lines)


def _lines(finding: Finding) -> list[str]:
    name = f"  {finding.name:<{WIDTH}}"
    if not finding.problem:
        return [f"{name} {finding.value}"]
    mark = "ERROR: " if finding.blocks else ""
    told = ": ".join(part for part in (finding.value, f"{mark}{finding.problem}", finding.fix) if part)
    return [f"{name} {told}"]
