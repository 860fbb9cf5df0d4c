"""The files of a checkpoint: tensors in the format of safetensors, written one at a time; sizes and checksums.

The library's own writer needs the bytes of all tensors at once, in host memory: for weights and optimizer states on a
GPU that is a second copy of both. Here `CHUNK` numbers are copied at a time. The library reads the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from radixtrain.checkpoints.sharded import whole
from radixtrain.text_files import check_file

CHUNK = 2 << 20  # numbers that are copied at once
ALIGNMENT = 8  # bytes

# What the format calls them.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class FileDigest:
    """A file's digest. size: in bytes. xxh3_128: 32 hexadecimal digits."""

    size: int
    xxh3_128: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a new file, and digest its bytes on the way."""
    hashed, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            hashed.update(chunk)
            size += len(chunk)
    return FileDigest(size, hashed.hexdigest())


def digest_of_file(path: Path) -> FileDigest:
    """Digest the whole file. Raises OSError if that fails."""
    check_file(path)
    with path.open("rb", buffering=0) as file:
        return FileDigest(path.stat().st_size, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file in the order in which they are written, which aligns them all."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], to_plain: Callable[[Tensor], Tensor] = whole
) -> FileDigest:
    """Write a new file of dense tensors, on any device, whose dtypes are in `DTYPES`. OSError if the disk is full.

    to_plain: called with each tensor in the order of `in_order`: a sharded one -> the whole of it.
    """
    ordered = in_order(tensors)
    header = _header(ordered)
    start = [len(header).to_bytes(8, "little"), header]
    return write_file(path, chain(start, *(_chunks(tensor, to_plain) for tensor in ordered.values())))


def read_tensors(path: Path, in_memory: bool = True) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU, in memory of their own. Raises SafetensorError for another kind of file.

    in_memory: False maps them: several processes share the bytes of the file until one of them writes to a tensor.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a mapping
        return {name: tensor.clone() for name, tensor in tensors.items()} if in_memory else tensors


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % ALIGNMENT)


def _chunks(tensor: Tensor, to_plain: Callable[[Tensor], Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; views of it if it is contiguous and on the CPU."""
    plain = to_plain(tensor)
    rows = plain.detach().reshape(-1 if plain.ndim == 0 else plain.shape)
    if rows.numel():
        for chunk in rows.split(max(1, CHUNK * len(rows) // rows.numel())):
            held = chunk.cpu().resolve_conj().resolve_neg().contiguous()
            yield memoryview(held.reshape(-1).view(torch.uint8).numpy())
