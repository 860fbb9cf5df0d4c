"""Variables named RADIXTRAIN_... that nothing reads: misspelt ones, and keys written as variables."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping

from radixtrain.commands import COMMANDS
from radixtrain.errors import did_you_mean

__all__ = ["VARIABLES", "warn_of_variables"]

logger = logging.getLogger(__name__)

PREFIX = "RADIXTRAIN_"
VARIABLES = ("CACHE", "TRITON")  # that people set; docs/configuration.md explains them
KEYS = re.compile(rf"({'|'.join(COMMANDS).upper()}|TRAINER|MODEL|DATA)__")  # as jsonargparse and others write them


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """A warning for each. Any other name may be somebody's own, so nothing is said of it."""
    for line in _unread(environment):
        logger.warning("%s", line)


def _unread(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        end = name.removeprefix(PREFIX)
        if end in (name, *VARIABLES):
            continue
        if KEYS.match(end):
            yield f"{name} is not read: give keys in the file of --config, or as --key value"
        elif near := did_you_mean(end, VARIABLES):
            yield f"{name} is not read{near.replace('mean ', f'mean {PREFIX}')}"
