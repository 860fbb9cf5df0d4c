"""What the Rust library of a tokenizer raises when it breaks off, as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from radixtrain.errors import UserError, first_line

__all__ = ["TokenizerFailed", "failures_of"]


class TokenizerFailed(UserError):
    """A tokenizer cannot tokenise a text, or cannot be made. Its message has no place in the data."""


@contextmanager
def failures_of(name_or_path: str) -> Iterator[None]:
    """Inside, an error or a panic of the library `tokenizers` is raised as TokenizerFailed.

    A panic is no Exception: it would pass every `except` and end a run with a traceback. It occurs, for instance, when
    a regular expression of `tokenizer.json` has tried too long.
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise TokenizerFailed(f"the tokenizer of {name_or_path} (tokenizer.json) failed: {first_line(error)}") from None


def _is_of_library(error: BaseException) -> bool:
    """Its own errors have no class, and the class of a panic cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"
