"""What every test of padded batches needs."""

from functools import partial

import pytest

from radixtrain.kernels.cascade import bundled_pieces


@pytest.fixture(autouse=True)
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles and strips of a few rows, so that a try of 40 tokens is as many calls as a real batch."""
    monkeypatch.setattr("radixtrain.tree.layout.bundled_pieces", partial(bundled_pieces, bundle=4))
    monkeypatch.setattr("radixtrain.kernels.cpu_loops.STRIP", 6)
