"""What every test of equivalence needs."""

import pytest


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles and strips of a few rows, so that a try of 40 tokens is as many calls as a real batch."""
    monkeypatch.setattr("radixtrain.kernels.cpu_loops.BUNDLE", 4)
    monkeypatch.setattr("radixtrain.kernels.cpu_loops.STRIP", 6)
