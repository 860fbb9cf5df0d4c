"""What `make test` proves once, and what `make test-full` adds: more cases of the same claims, and the slow ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

FULL = pytest.mark.full
TRIES = int(os.environ.get("RADIXTRAIN_TRIES", "10"))  # `make test-full` sets 50


def tries(usual: int, most: int) -> int:
    """How often a slow thing is tried: `usual` in `make test-full`, and with RADIXTRAIN_TRIES=500 ten times as often.

    most: more is never needed, since then every case has been tried.
    """
    return min(most, max(1, usual * TRIES // 50))


def cases(every: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every one, of which `make test` runs those in `quick`. A tuple is of several arguments."""
    every, chosen = list(every), list(quick)
    assert chosen and all(case in every for case in chosen)
    values = [case if isinstance(case, tuple) else (case,) for case in every]
    return [pytest.param(*each, marks=() if case in chosen else FULL) for case, each in zip(every, values, strict=True)]
