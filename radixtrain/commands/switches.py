"""`--overwrite` and `--json`: a key that is true or false may stand without a value, and is true then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from radixtrain.commands.keys import keys_of

__all__ = ["with_values"]


def with_values(arguments: Sequence[str]) -> list[str]:
    """The arguments with `true` after each such key that no value follows. arguments: the command and those after it.

    Keys of Lightning's trainer are left as they are.
    """
    switches = {f"--{key.name}" for key in keys_of(arguments[0]) if key.kind == "true, false"}
    given: list[str] = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        given += [word, "true"] if word in switches and following.startswith("--") else [word]
    return given
