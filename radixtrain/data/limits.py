"""Which numbers the settings of `SFTData` may hold, refused by the names of their keys."""

from __future__ import annotations

import math
from typing import Any

from radixtrain.data.grouping import check_group_by_prefix
from radixtrain.errors import UserError

__all__ = ["check_sizes"]

LARGEST = 2**31 - 1
# Least and most. Steps of 16 million conversations take a second to draw; more than a thousand processes exhaust the
# machine before any of them reads a row.
LIMITS = {
    "batch_size": (1, 2**24),
    "max_tokens": (1, LARGEST),
    "max_length": (2, LARGEST),
    "min_shared_tokens": (1, LARGEST),
    "pad_to_multiple_of": (1, LARGEST),
    "dataset_num_proc": (1, 1024),
    "dataloader_num_workers": (0, 1024),
    "seed": (0, 2**32 - 1),
}


def check_sizes(settings: Any) -> None:
    """UserError for a number that is too small or too large, alone or for another one. settings: of an `SFTData`."""
    for name, (least, most) in LIMITS.items():
        value = settings[name]
        if value in ("auto", None):
            continue
        if not value >= least:
            raise UserError(f"data.{name} must be at least {least}, got {value}")
        if not value <= most:
            raise UserError(f"data.{name} must be at most {most}, got {value}")
    if not 0 <= settings.val_size < math.inf:
        raise UserError(f"data.val_size must be a share below 1 or a number of conversations, got {settings.val_size}")
    check_group_by_prefix(settings.group_by_prefix, settings.batch_size, settings.shuffle_dataset)
    for name in ("max_length", "pad_to_multiple_of"):
        if settings[name] is not None and settings[name] > settings.max_tokens:
            raise UserError(_exceeds_budget(name, settings))


def _exceeds_budget(name: str, settings: Any) -> str:
    what = "a sequence that long has" if name == "max_length" else "rows padded to it have"
    return (
        f"data.{name} {settings[name]} exceeds data.max_tokens {settings.max_tokens}: {what} no micro-batch to go "
        f"into; raise max_tokens or lower {name}"
    )
