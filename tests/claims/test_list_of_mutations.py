"""Every mutation of 28 November 2026 is still planted: tests/golden/mutations.txt has one line for each.

What replaces one is written in its place, with the reason in the commit.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LISTED = (HERE.parent / "golden" / "mutations.txt").read_text(encoding="utf-8").splitlines()


def test_every_listed_mutation_is_collected(request: pytest.FixtureRequest) -> None:
    modules = [
        (path, pytest.Module.from_parent(request.session, path=path))
        for path in sorted(HERE.rglob("test_*mutation*.py"))
    ]
    found = {f"{path.relative_to(HERE)}::{item.name}" for path, module in modules for item in module.collect()}
    assert sorted({*LISTED} - found) == []
