"""What a user chooses for a shared model, checked before anything is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from radixtrain.errors import UserError


class Options(NamedTuple):
    """The options of `share_prefixes`, as they were given."""

    attention: str
    kernel: str
    min_shared_tokens: int
    min_ratio: float
    allow_dropout: tuple[str, ...]

    @classmethod
    def checked(cls, min_shared_tokens: Any, min_ratio: Any, allow_dropout: Any, **others: str) -> Options:
        """Raise UserError for values of another type or below the smallest."""
        if isinstance(allow_dropout, str) or not isinstance(allow_dropout, Iterable):
            raise UserError(f"allow_dropout must be a list of names, got {allow_dropout!r}")
        if type(min_shared_tokens) is not int or min_shared_tokens < 1:
            raise UserError(f"min_shared_tokens must be a whole number from 1 on, got {min_shared_tokens!r}")
        if type(min_ratio) not in (int, float) or not min_ratio >= 0:
            raise UserError(f"min_ratio must be a number from 0 on, got {min_ratio!r}")
        return cls(
            min_shared_tokens=min_shared_tokens,
            min_ratio=min_ratio,
            allow_dropout=tuple(allow_dropout),
            **others,
        )
