"""A state as JSON and tensors by file, and back: exact, and without code.

What JSON cannot express is an object whose first key starts with `$`:

    {"$tuple": [0.9, 0.999]}    {"$set": ["q_proj"]}    {"$dict": [[0, "first"], [1, "second"]]}
    {"$float": "-inf"}          {"$bytes": "AA=="}      in base64
    {"$tensor": ["model.safetensors", "model.norm.weight"]}
    {"$array": ["state.safetensors", "rng.numpy.1"], "dtype": "<u4", "shape": [624]}      of NumPy; a scalar: shape []
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.checkpoints.sharded import is_sharded, part_of, place_in_memory
from radixtrain.checkpoints.tensors import DTYPES
from radixtrain.errors import UserError

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
RESERVED = "__metadata__"  # no name of a tensor, in the format of safetensors
NUMBERS = "biufc"  # kinds of NumPy dtypes that are kept
CONTAINERS = {"$tuple": tuple, "$set": set, "$dict": dict}
Keys = tuple[Any, ...]  # keys and positions, from the state down to an entry
Tensors = Mapping[str, Mapping[str, Tensor]]  # by file and name


class MalformedState(ValueError):
    """A skeleton that `pack` did not make, or whose tensors are missing."""


@dataclass(frozen=True)
class Packed:
    """A packed state. skeleton: what JSON can hold. tensors: by file and name."""

    skeleton: Any
    tensors: Tensors

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.tensors.values() for t in tensors.values())


def pack(state: Mapping[str, Any]) -> Packed:
    """Pack dictionaries, lists, tuples, sets, numbers, text, bytes, tensors and arrays of numbers, nested.

    Tensors are not copied, and those of one file that are the same in memory are one afterwards too. A file path
    becomes text, and an instance of a subclass of a plain type becomes that type.

    Raises UserError for anything else; it names the entry, such as `callbacks.Mine.model`.
    """
    packer = _Packer()
    try:
        return Packed(packer.skeleton_of(state, ()), packer.tensors)
    except RecursionError:
        raise UserError("a checkpoint cannot hold a state that is nested without end") from None


def unpack(packed: Packed) -> Any:
    """Restore the state that was packed. Raises MalformedState if `pack` did not make the skeleton."""
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

    def skeleton_of(self, value: object, path: Keys) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._reference(_dense(value, path), path)}
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) is list:
            return self._list(value, path)
        if type(value) in (tuple, torch.Size):
            return {"$tuple": self._list(value, path)}
        if type(value) is set:
            return {"$set": self._list(value, path)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, bytes | bytearray):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in NUMBERS:
            data = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)[: value.nbytes]
            return {"$array": self._reference(data, path), "dtype": value.dtype.str, "shape": list(value.shape)}
        raise UserError(
            f"a checkpoint cannot hold {_name(path)}, a {type(value).__module__}.{type(value).__qualname__}; it keeps "
            f"dictionaries, lists, tuples, sets, numbers, text, bytes, tensors and arrays of numbers"
        )

    def _list(self, values: Any, path: Keys) -> list[Any]:
        return [self.skeleton_of(value, (*path, index)) for index, value in enumerate(values)]

    def _dict(self, values: dict[Any, Any], path: Keys) -> dict[str, Any]:
        if all(type(key) is str and not key.startswith("$") for key in values):
            return {key: self.skeleton_of(value, (*path, key)) for key, value in values.items()}
        pairs = [[self.skeleton_of(key, (*path, key)), self.skeleton_of(values[key], (*path, key))] for key in values]
        return {"$dict": pairs}

    def _reference(self, tensor: Tensor, path: Keys) -> list[str]:
        """Return the file and the name under which a tensor is stored, once per file for all that share memory.

        So an entry of a state needs no file but the one of its key.
        """
        file, memory, held = file_of(path[0]), place_in_memory(tensor), part_of(tensor)
        view = (tensor.dtype, tensor.shape, tensor.stride(), held.is_conj(), held.is_neg())
        key = path if memory is None else (file, memory, *view)
        if key not in self.references:
            name = _unused(_name(path[1:] if file == MODEL else path), self.tensors[file])
            self.tensors[file][name] = tensor.detach()
            self.references[key] = [file, name]
        return self.references[key]


def file_of(key: Any) -> str:
    """Return the file for the tensors under a key of the state."""
    return {"state_dict": MODEL, "optimizer_states": OPTIMIZER}.get(key, STATE)


def _dense(tensor: Tensor, path: Keys) -> Tensor:
    """Raise UserError for a tensor that is neither plain nor sharded, or whose dtype the files do not have."""
    is_known = type(tensor) in (Tensor, nn.Parameter) or is_sharded(tensor)
    is_plain = is_known and tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype not in DTYPES:
        kind = f"{type(tensor).__name__} of {tensor.dtype} ({tensor.layout}, on {tensor.device})"
        raise UserError(f"a checkpoint cannot hold {_name(path)}, a {kind}; it keeps dense tensors of common dtypes")
    return tensor


def _name(path: Keys) -> str:
    return ".".join(str(key) for key in path).encode("utf-8", "backslashreplace").decode()


def _unused(name: str, used: Mapping[str, Any]) -> str:
    unique, count = name, 1
    while unique in used or unique == RESERVED:
        unique, count = f"{name}#{count}", count + 1
    return unique


def _state_of(skeleton: object, tensors: Tensors) -> Any:
    if isinstance(skeleton, list):
        return [_state_of(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: _state_of(value, tensors) for key, value in skeleton.items()}
    content = skeleton[tag]
    if tag in ("$tensor", "$array"):
        file, name = content
        tensor = tensors[file][name]
        return tensor if tag == "$tensor" else _array_of(tensor, skeleton["dtype"], skeleton["shape"])
    if tag == "$float":
        return float(content)
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag not in CONTAINERS or not isinstance(content, list):
        raise MalformedState(f"nothing known by the name {tag}")
    return CONTAINERS[tag](_state_of(content, tensors))


def _array_of(data: Tensor, dtype: str, shape: list[int]) -> Any:
    kind = np.dtype(str(dtype))
    if kind.kind not in NUMBERS or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != data.nbytes:
        raise MalformedState(f"no array: {data.nbytes} bytes of {dtype} in shape {shape}")
    return np.ndarray(tuple(shape), kind, buffer=bytearray(data.numpy().tobytes()))[() if not shape else ...]
