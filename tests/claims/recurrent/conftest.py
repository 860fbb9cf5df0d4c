"""Fails the tests of this folder in which a layer computes whole sequences."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forks(caplog: pytest.LogCaptureFixture, free_forks: None) -> Iterator[None]:
    """No test here may fall back to whole sequences, which are exact too and so would hide what is tried."""
    with caplog.at_level(logging.WARNING, "radixtrain"):
        yield
    said = [each.message for each in caplog.get_records("call")]
    assert not [each for each in said if "from its first token on" in each]
