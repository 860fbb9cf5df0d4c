"""Modules that a benchmark measures if they are there: packages, and files of `recipes` that not every copy has."""

import importlib
from typing import Any

from radixtrain.errors import UserError

__all__ = ["optional"]


def optional(name: str) -> Any:
    """The module. Raises UserError if it is not there, for the list of what was left out."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is not there: {error}") from None
