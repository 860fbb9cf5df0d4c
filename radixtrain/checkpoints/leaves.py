"""Single values that JSON does not know, as an object with one key that starts with `$`, and back."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

__all__ = ["DECODE", "PLAIN_ARRAYS", "UnknownKindError", "leaf"]

PLAIN_ARRAYS = "biufcmMSU"  # kinds of NumPy dtypes whose values are their bytes; text of a fixed length last
PLAIN_SCALARS = "biufcmM"


class UnknownKindError(TypeError):
    """A value that a checkpoint cannot hold."""


def leaf(value: Any) -> Any:
    """The value in types of JSON. UnknownKindError if it is of another kind than those of `DECODE` and of JSON."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in PLAIN_SCALARS:
        return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, str | PurePath):
        return _text(str.__str__(value) if isinstance(value, str) else str(value))
    if isinstance(value, int):
        return int(value) if value.bit_length() < 64 else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    raise UnknownKindError(f"{type(value).__module__}.{type(value).__qualname__}")


def _text(text: str) -> Any:
    """JSON would join a pair of surrogates."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        return {"$text": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}
    return text


def _decode_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_text(text: str) -> str:
    return _decode_bytes(text).decode("utf-8", "surrogatepass")


def _decode_complex(parts: list[str]) -> complex:
    return complex(*map(float.fromhex, parts))


def _decode_dtype(name: str) -> torch.dtype:
    dtype = vars(torch)[name]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _decode_scalar(parts: list[str]) -> Any:
    name, digits = parts
    dtype = np.dtype(str(name))
    if dtype.kind not in PLAIN_SCALARS:
        raise ValueError(f"{name} is no number")
    (scalar,) = np.frombuffer(bytes.fromhex(digits), dtype)
    return scalar


DECODE: dict[str, Callable[[Any], Any]] = {
    "$bytes": _decode_bytes,
    "$complex": _decode_complex,
    "$device": torch.device,
    "$dtype": _decode_dtype,
    "$float": float,
    "$int": lambda digits: int(digits, 16),
    "$scalar": _decode_scalar,
    "$text": _decode_text,
}
