"""Which cases run by default: those that take the most paths in the least time. RADIXTRAIN_TRIES=1 runs all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["cases", "only_in_full"]

only_in_full = pytest.mark.skipif("RADIXTRAIN_TRIES" not in os.environ, reason="RADIXTRAIN_TRIES=1 runs it")


def cases(every: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every one, of which those that are not in `default` are skipped unless all run."""
    chosen = list(default)
    assert chosen and all(case in list(every) for case in chosen)
    return [pytest.param(case, marks=() if case in chosen else only_in_full) for case in every]
