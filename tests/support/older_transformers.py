"""Tests beside an older transformers: one that needs what it lacks skips, and says what.

constraints.txt has the one that the tests were written with. `make test-versions` runs them beside older ones.
"""

import re
from pathlib import Path
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
