"""A file of transformers in which something has another name, as a later release might have it."""

import sys
from pathlib import Path
from types import ModuleType

import pytest


def renamed(module: ModuleType, names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of a module with other names everywhere, old -> new. Its classes belong to the copy."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    for old, new in names.items():
        assert old in source, f"{module.__name__} has no {old!r}"
        source = source.replace(old, new)
    copy = ModuleType(f"{module.__name__}_renamed")
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    exec(compile(source, str(module.__file__), "exec"), vars(copy))
    return copy
