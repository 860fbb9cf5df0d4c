"""Lets the tests of this folder import `hybrids.py`, and fails those in which a layer computes whole sequences."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def forks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test here may fall back to whole sequences, which are exact too and so would hide what is tried."""
    with caplog.at_level(logging.WARNING, "radixtrain"):
        yield
    said = [each.message for each in caplog.get_records("call")]
    assert not [each for each in said if "from its first token on" in each]
