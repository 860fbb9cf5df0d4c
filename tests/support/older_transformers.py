"""Tests beside an older transformers: one that needs what it lacks skips, and says what.

constraints.txt has the one that the tests were written with. `make test-versions` runs them beside older ones.

A file of transformers in which something has another name, as a later release might have it.
"""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from transformers import __version__

from radixtrain.versions import transformers_is_before

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
IS_OLDER = transformers_is_before(re.findall(r"^transformers==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)[0])


def since(version: str, what: str) -> pytest.MarkDecorator:
    """The mark of a test. what: of older versions, which it cannot be right beside."""
    return pytest.mark.skipif(transformers_is_before(version), reason=f"before transformers {version}: {what}")


NEEDS_FORKS = since("5.21", "states of recurrent layers do not fork")
PASSED_ON = since("5.3", "GPT-2 and StableLM pass nothing of a radix batch on to their backbone")


def skip_missing(name: str) -> NoReturn:
    """name: a class of transformers that this test needs, and an older one does not have."""
    pytest.skip(f"transformers {__version__} has no {name}")


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
