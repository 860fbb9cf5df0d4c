"""The floats of a feature, one for each token: loss weights, and what a policy loss reads beside the log-probabilities.

They are aligned with the labels, not shifted: entry t belongs to token t, which is predicted from the one before. They
become float32 here, as in the tensor that an ordinary collator would make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from radixtrain.collators.targets import IGNORE_INDEX, FloatArray

__all__ = ["FLOATS", "FLOAT_ENTRIES", "token_floats"]

FLOATS = {"loss_weights": ("loss_weights", "weights"), "old_logprobs": ("old_logprobs",), "advantages": ("advantages",)}
"""The floats that a feature may have, and the names of its entry."""
FLOAT_ENTRIES = frozenset(entry for entries in FLOATS.values() for entry in entries)
ONE_FOR_ALL = frozenset({"advantages"})  # may be a single number for all tokens


def token_floats(feature: Mapping[str, Any], labels: npt.NDArray[np.int64], index: int) -> dict[str, FloatArray]:
    """The floats that a feature has, each (L,), 0 on tokens without a label, whatever is given there.

    labels: (L,). index: of the feature, for the error.

    Raises ValueError that names the feature and the entry for: two names of the same floats; what is not a flat list of
    numbers as long as the labels (or one number, for advantages); a number on a labelled token that float32 does not
    hold.
    """
    given = {}
    for name, entries in FLOATS.items():
        named = [entry for entry in entries if feature.get(entry) is not None]
        if len(named) > 1:
            raise ValueError(f"feature {index} has {' and '.join(named)}, two names of the same weights; remove one")
        if named:
            given[name] = _floats(feature, named[0], labels, index)
    return given


def _floats(feature: Mapping[str, Any], name: str, labels: npt.NDArray[np.int64], index: int) -> FloatArray:
    try:
        values = np.asarray(feature[name])
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a device, or of a dtype of torch's own
        raise _no_numbers(name, f"a {type(feature[name]).__name__} that NumPy cannot read", index) from None
    is_one_for_all = name in ONE_FOR_ALL and values.ndim == 0
    if values.dtype.kind not in "fiu" or not (values.ndim == 1 or is_one_for_all):
        raise _no_numbers(name, f"{values.dtype} {values.shape}", index)
    if values.ndim == 1 and len(values) != len(labels):
        raise ValueError(f"feature {index}: {name} has {len(values)} entries, input_ids has {len(labels)}")
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.where(labels != IGNORE_INDEX, values, 0).astype(np.float32)
    if not np.isfinite(floats).all():
        place = int((~np.isfinite(floats)).argmax())
        came = values if is_one_for_all else values[place]
        raise ValueError(f"feature {index}: {name} must be finite on labelled tokens: {name}[{place}] = {came}")
    return floats


def _no_numbers(name: str, came: str, index: int) -> ValueError:
    wanted = "a flat list of numbers" + (" or one number" if name in ONE_FOR_ALL else "")
    return ValueError(f"feature {index}: {name} must be {wanted}, got {came}")
