"""One headless browser for the tests of this folder, which may import its `headless_browser`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from headless_browser import Browser, found


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = found()
    if executable is None:
        pytest.skip("no Chromium or Chrome on the PATH: apt-get install chromium")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as started:
        yield started
