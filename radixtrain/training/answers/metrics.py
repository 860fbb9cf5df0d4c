"""Metrics of answers: built in, or a function of the user."""

from __future__ import annotations

import importlib
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixtrain.errors import UserError, did_you_mean, first_line

KEY = "evaluate_generation.metric"
OWN_METRICS = ("exact_match", "contains", "regex")
LOGGED = ("loss",)  # names that have an `eval_` metric already

Rows = Sequence[Mapping[str, str]]
Judge = Callable[[list[str], list[str], Rows], Any]
"""Takes answers, targets and rows, and returns a number for each. A row has `row`, its `file:line`, and `prompt`."""


@dataclass(frozen=True)
class Metric:
    """A metric of answers. name: in the log, after `eval_`. judge: answers, targets and rows to a number per answer."""

    name: str
    judge: Judge

    def __call__(self, answers: list[str], targets: list[str], rows: Rows) -> list[float]:
        """Score each answer. Raises UserError, in one line, if a user's function fails or does not return numbers."""
        try:
            scores = self.judge(answers, targets, rows)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise anything
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}:{last.lineno}: {type(error).__name__}: {first_line(error)}"
            raise UserError(f"{KEY}: {self.name} failed at {place}") from error
        numbers = _numbers(scores)
        if numbers is None:
            found = f"{type(scores).__name__} {scores!r}"[:100]
        elif len(numbers) != len(answers):
            found = f"{len(numbers)} numbers"
        elif not all(map(math.isfinite, numbers)):
            found = "one that is not finite"
        else:
            return numbers
        raise UserError(
            f"{KEY}: {self.name} must return a list with a number for each of {len(answers)} answers, found {found}"
        )


def _numbers(scores: Any) -> list[float] | None:
    """Convert the result of a user's function to a list of numbers; None if that is not possible."""
    try:
        return [float(score) for score in scores]
    except (TypeError, ValueError):
        return None


def load_metric(name: str, pattern: str | None = None) -> Metric:
    """Load a metric by its name, or a function by its path `package.module.function`.

    exact_match: 1 if answer and target are equal but for blanks at their ends.
    contains: 1 if the target, without blanks at its ends, is a part of the answer.
    regex: 1 if `pattern` finds the same in both: its first group, or without groups the whole match.

    Raises UserError for an unknown name, a function that cannot be imported, and a pattern that is missing, is not
    valid or is not read.
    """
    if name == "regex":
        return Metric(name, _regex(pattern))
    if pattern is not None:
        raise UserError(f"evaluate_generation.pattern is read only by the metric regex, not by {name}")
    if name in OWN_METRICS:
        return Metric(name, {"exact_match": _exact_match, "contains": _contains}[name])
    if "." not in name:
        functions = "or a function of yours by its path, module.function"
        expected = f"; expected one of {', '.join(OWN_METRICS)}, {functions}"
        raise UserError(f"{KEY}: no metric {name!r}{did_you_mean(name, OWN_METRICS, expected)}")
    return _of_user(name)


def _exact_match(answers: list[str], targets: list[str], rows: Rows) -> list[bool]:
    return [answer.strip() == target.strip() for answer, target in zip(answers, targets, strict=True)]


def _contains(answers: list[str], targets: list[str], rows: Rows) -> list[bool]:
    return [target.strip() in answer for answer, target in zip(answers, targets, strict=True)]


def _regex(pattern: str | None) -> Judge:
    if pattern is None:
        raise UserError("evaluate_generation.pattern is missing: the metric regex compares what it finds")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"evaluate_generation.pattern: {pattern!r} is not a regular expression: {error}") from None

    def judge(answers: list[str], targets: list[str], rows: Rows) -> list[bool]:
        expected = [_found(compiled, target) for target in targets]
        if None in expected:
            first = rows[expected.index(None)]["row"]
            count = f"{expected.count(None)} of {len(expected)} targets"
            raise UserError(f"evaluate_generation.pattern: finds nothing in {count}, first in that of {first}")
        return [_found(compiled, answer) == each for answer, each in zip(answers, expected, strict=True)]

    return judge


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match if match is None else match[min(1, pattern.groups)]


def _of_user(path: str) -> Metric:
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        place = "run `python -m radixtrain` in the folder that holds it, or name that folder in PYTHONPATH"
        raise UserError(f"{KEY}: {path} cannot be imported: no module {error.name!r}; {place}") from None
    except Exception as error:  # a module may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{KEY}: {path} cannot be imported: {reason}") from error
    if not callable(function):
        raise UserError(f"{KEY}: no function {name!r} in {module_name}")
    if name in LOGGED:
        raise UserError(f"{KEY}: eval_{name} is logged already; give {path} another name")
    return Metric(name, function)
