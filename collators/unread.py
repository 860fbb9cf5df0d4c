"""The entries of a feature that no collator reads: which are ignored, and which are refused.

A collator drops what it does not read. If a model read such an entry, the gradient would change, so an entry that could
be an input of a model is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, time, timedelta
from typing import Any

import numpy as np

__all__ = ["HARMLESS", "check_unread"]

HARMLESS = frozenset(
    (
        *("length", "num_tokens", "num_truncated_tokens", "overflowing_tokens"),  # sizes, and what a tokenizer cut off
        *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"),  # a tokenizer's notes on its tokens
        *("id", "idx", "index", "row_id", "__index_level_0__"),  # which example it is; the last name is from pandas
    )
)
"""Bookkeeping numbers: accepted but not read, since no causal model of transformers takes them as input."""
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})  # paths and undecoded bytes too
_METADATA = (str, bytes, type(None), dict, date, time, timedelta)
_UNREAD = {
    r"^token_type_ids$": "is not read by radixtrain, and a model that reads it, such as GPT-2, would get another "
    "gradient; tokenize with tokenizer(..., return_token_type_ids=False), or remove the column",
    r"pixel|image|video|audio|^input_features|^mm_": "is not read by radixtrain: radixtrain trains on text only; "
    "remove the column if the text is complete without it",
    r"^inputs_embeds$": "is not read by radixtrain, which shares tokens by their ids; remove the column",
    r"": "is not read by radixtrain, and a model or loss that reads it would get another gradient; remove the column",
}


def check_unread(entries: Mapping[str, Any], index: int) -> None:
    """Refuse an image, video or audio, also as a path, and any other entry that could be an input of a model.

    Ignored are `HARMLESS` names, and text, None, a dict, a date or a list of those.

    entries: those of a feature that the collator does not read. index: of the feature, for the error.

    Raises ValueError that names the feature and the entry.
    """
    for name, value in entries.items():
        if name in _MEDIA and _holds_nothing(value):
            continue  # a feature without media, in a data set whose other features have some
        if name in _MEDIA or not (name in HARMLESS or isinstance(value, _METADATA) or _is_metadata(value)):
            reason = next(reason for pattern, reason in _UNREAD.items() if re.search(pattern, str(name)))
            raise ValueError(f"feature {index}: {name} ({_kind_of(value)}) {reason}")


def _holds_nothing(value: Any) -> bool:
    leaf = _first_leaf(value)
    return leaf is None or (hasattr(leaf, "__len__") and len(leaf) == 0)


def _is_metadata(value: Any) -> bool:
    """Text, None, a dict, a date or a list of those, judged by its first entry: no model takes one as input."""
    leaf = _first_leaf(value)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O":
        return _is_metadata(leaf.tolist())
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "USMm"
    return isinstance(leaf, _METADATA)


def _first_leaf(value: Any) -> Any:
    """The first entry of nested lists that is not None; None if there is no other."""
    if not isinstance(value, list | tuple):
        return value
    return next((leaf for leaf in map(_first_leaf, value) if leaf is not None), None)


def _kind_of(value: Any) -> str:
    shape = getattr(value, "shape", None)
    size = f" of {len(value)}" if isinstance(value, list | tuple) else f" of shape {tuple(shape)}" if shape else ""
    return f"{type(value).__name__}{size}"
