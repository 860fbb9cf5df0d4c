"""Sequences of one prompt, and a headless browser; the tests of this folder may import `headless_browser`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from headless_browser import Browser, found


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = found()
    if executable is None:
        pytest.skip("no Chromium or Chrome on the PATH: apt-get install chromium")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def features() -> list[dict[str, Any]]:
    """One prompt of 30 tokens, answers of 3 to 8 that differ from their first token on."""
    rng = np.random.default_rng(0)
    prompt, found = rng.integers(0, 50, 30), []
    for first, length in enumerate(rng.integers(3, 9, 16)):
        ids = np.concatenate([prompt, [first], rng.integers(0, 50, length - 1)])
        found.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < 30, -100, ids)})
    return found
