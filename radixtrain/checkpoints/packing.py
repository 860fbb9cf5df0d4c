"""A state as a skeleton of JSON and tensors by file, and back: exact, and without code.

What JSON cannot say is an object whose first key starts with `$`. Containers and tensors, with examples:

    {"$tuple": [0.9, 0.999]}    {"$set": ["q_proj"]}    {"$dict": [[0, "first"], [1, "second"]]}
    {"$tensor": ["model.safetensors", "model.norm.weight"]}
    {"$array": ["state.safetensors", "rng.numpy.1"], "dtype": "<u4", "shape": [624]}

The others are single values, in `DECODE`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.checkpoints.sharded import is_sharded, part_of, place_in_memory
from radixtrain.checkpoints.tensors import DTYPES
from radixtrain.errors import UserError

__all__ = ["MODEL", "OPTIMIZER", "STATE", "MalformedState", "Packed", "file_of", "pack", "unpack"]

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
RESERVED = "__metadata__"  # no name of a tensor, in the format of safetensors
Path = tuple[Any, ...]  # keys and positions, from the state down to an entry
Tensors = Mapping[str, Mapping[str, Tensor]]  # by file and name


class MalformedState(ValueError):
    """A skeleton that `pack` did not make, or whose tensors are missing."""


@dataclass(frozen=True)
class Packed:
    """skeleton: what JSON can hold. tensors: by file and name."""

    skeleton: Any
    tensors: Tensors

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.tensors.values() for t in tensors.values())


def pack(state: Mapping[str, Any]) -> Packed:
    """Dictionaries, lists, tuples, sets, numbers, text, bytes, tensors and arrays, nested, as a skeleton and tensors.

    Tensors are not copied, and those of one file that are the same in memory are one afterwards too. A path of files
    becomes text, a dictionary of any kind a `dict`.

    Raises UserError for anything else; it names the entry, such as `callbacks.Mine.model`.
    """
    packer = _Packer()
    try:
        return Packed(packer.skeleton_of(state, ()), packer.tensors)
    except RecursionError:
        raise UserError("a checkpoint cannot hold a state that is nested without end") from None


def unpack(packed: Packed) -> Any:
    """The state that was packed. MalformedState if `pack` did not make the skeleton."""
    try:
        return _state_of(packed.skeleton, packed.tensors)
    except MalformedState:
        raise
    except (ArithmeticError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise MalformedState(f"{type(error).__name__}: {error}") from error


@dataclass
class _Packer:
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {MODEL: {}, OPTIMIZER: {}, STATE: {}})
    references: dict[Any, list[str]] = field(default_factory=dict)  # of tensors, by their place in memory

    def skeleton_of(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._reference(_dense(value, path), path)}
        if type(value) is np.ndarray and value.dtype.kind in PLAIN_ARRAYS:
            return self._array(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) is list:
            return self._list(value, path)
        if type(value) in (tuple, torch.Size):
            return {"$tuple": self._list(value, path)}
        if type(value) is set:
            return {"$set": self._list(value, path)}
        try:
            return leaf(value)
        except UnknownKindError as error:
            raise UserError(
                f"a checkpoint cannot hold {_name(path)}, a {error}; it keeps dictionaries, lists, tuples, sets, "
                f"numbers, text, bytes, tensors and arrays"
            ) from None

    def _list(self, values: Any, path: Path) -> list[Any]:
        return [self.skeleton_of(value, (*path, index)) for index, value in enumerate(values)]

    def _dict(self, values: dict[Any, Any], path: Path) -> dict[str, Any]:
        if all(type(key) is str and leaf(key) == key and not key.startswith("$") for key in values):
            return {key: self.skeleton_of(value, (*path, key)) for key, value in values.items()}
        pairs = [(self.skeleton_of(key, (*path, key)), self.skeleton_of(values[key], (*path, key))) for key in values]
        return {"$dict": [list(pair) for pair in pairs]}

    def _array(self, array: np.ndarray, path: Path) -> dict[str, Any]:
        data = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)[: array.nbytes]
        return {"$array": self._reference(data, path), "dtype": array.dtype.str, "shape": list(array.shape)}

    def _reference(self, tensor: Tensor, path: Path) -> list[str]:
        """The file and the name under which a tensor is stored, in each file once for all that are the same in memory.

        So an entry of a state needs no file but the one of its key.
        """
        file, memory, held = file_of(path[0]), place_in_memory(tensor), part_of(tensor)
        view = (tensor.dtype, tensor.shape, tensor.stride(), held.is_conj(), held.is_neg())
        place = path if memory is None else (file, memory, *view)
        if place not in self.references:
            name = _unused(_name(path[1:] if file == MODEL else path), self.tensors[file])
            self.tensors[file][name] = tensor.detach()
            self.references[place] = [file, name]
        return self.references[place]


def file_of(key: Any) -> str:
    """The file for the tensors under a key of the state."""
    return {"state_dict": MODEL, "optimizer_states": OPTIMIZER}.get(key, STATE)


def _dense(tensor: Tensor, path: Path) -> Tensor:
    """UserError for a tensor that is not a plain or a sharded one, or whose dtype the files do not have."""
    is_known = type(tensor) in (Tensor, nn.Parameter) or is_sharded(tensor)
    is_plain = is_known and tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype not in DTYPES:
        kind = f"{type(tensor).__name__} of {tensor.dtype} ({tensor.layout}, on {tensor.device})"
        raise UserError(f"a checkpoint cannot hold {_name(path)}, a {kind}; it keeps dense tensors of common dtypes")
    return tensor


def _name(path: Path) -> str:
    return ".".join(str(key) for key in path).encode("utf-8", "backslashreplace").decode()


def _unused(name: str, used: Mapping[str, Any]) -> str:
    unique, count = name, 1
    while unique in used or unique == RESERVED:
        unique, count = f"{name}#{count}", count + 1
    return unique


def _state_of(skeleton: Any, tensors: Tensors) -> Any:
    if isinstance(skeleton, list):
        return [_state_of(each, tensors) for each in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: _state_of(each, tensors) for key, each in skeleton.items()}
    if tag == "$tensor":
        return _tensor_of(skeleton[tag], tensors)
    if tag == "$array":
        return _array_of(_tensor_of(skeleton[tag], tensors), skeleton["dtype"], skeleton["shape"])
    if tag in DECODE:
        return DECODE[tag](skeleton[tag])
    return _container_of(tag, _state_of(skeleton[tag], tensors))


def _container_of(tag: str, items: Any) -> Any:
    makers = {"$tuple": tuple, "$set": set, "$dict": dict}
    if tag not in makers or not isinstance(items, list):
        raise MalformedState(f"nothing known by the name {tag}")
    return makers[tag](items)


def _tensor_of(reference: Any, tensors: Tensors) -> Tensor:
    file, name = reference
    return tensors[file][name]


def _array_of(data: Tensor, dtype: str, shape: list[int]) -> np.ndarray:
    kind = np.dtype(str(dtype))
    if kind.kind not in PLAIN_ARRAYS or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != data.nbytes:
        raise MalformedState(f"no array: {data.nbytes} bytes of {dtype} in shape {shape}")
    return np.ndarray(tuple(shape), kind, buffer=bytearray(data.numpy().tobytes()))


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
