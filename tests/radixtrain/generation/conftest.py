"""What tests of generation share."""

from collections.abc import Iterator

import pytest

from radixtrain.verification.oracle import float64_arithmetic


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Two ways to compute a number agree to 1e-12 then, on every processor; so sampled and greedy tokens are equal."""
    with float64_arithmetic():
        yield
