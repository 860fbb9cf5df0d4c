"""The tensors of a checkpoint: parts of a `DTensor`, files in the format of safetensors, checksums.

The library's own writer needs the bytes of all tensors at once, in host memory: for weights and optimizer states on a
GPU that is a second copy of both. Here one tensor is copied at a time. The library reads the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from radixtrain.text_files import check_file

ALIGNMENT = 8  # bytes


def is_sharded(tensor: object) -> bool:
    """Return whether each rank holds a part of it, as FSDP2 shards weights by rows. Its shape is that of the whole."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, on every rank, each of which calls this; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a sharded tensor, which may be nothing; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: object) -> Tensor:
    """Shard a whole tensor as another one, on that one's device, in memory of its own. Nothing is sent.

    Returns a copy if their shapes differ, and the tensor itself if the other one is not sharded.
    """
    if not isinstance(like, DTensor):
        return tensor
    if tensor.shape != like.shape:
        return tensor.clone()
    assert like.placements == (Shard(0),), "fully_shard divides rows among the ranks of one mesh"
    mesh = like.device_mesh
    rank, parts = mesh.get_local_rank(), tensor.chunk(mesh.size())
    mine = parts[rank] if rank < len(parts) else tensor[:0]  # fewer rows than ranks
    held = mine.to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(held, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


@dataclass(frozen=True)
class FileDigest:
    """A file's digest. size: in bytes. xxh3_128: 32 hexadecimal digits."""

    size: int
    xxh3_128: str


def digest_of_file(path: Path) -> FileDigest:
    """Digest the whole file. Raises OSError if that fails."""
    check_file(path)
    with path.open("rb", buffering=0) as file:
        return FileDigest(path.stat().st_size, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write a new file. Returns the digest of its bytes, as `FileDigest.xxh3_128`."""
    hashed = xxhash.xxh3_128()
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            hashed.update(chunk)
    return hashed.hexdigest()


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file in the order in which they are written, which aligns them all."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def gathered(*files: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of files in the order in which they are written, the whole of each that is sharded.

    Every rank takes them all, one at a time: rank 0 writes them, and the others help to gather.
    """
    return (whole(tensor) for tensors in files for tensor in in_order(tensors).values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], wholes: Iterator[Tensor]) -> str:
    """Write a new file of dense tensors, on any device. Returns its digest. Raises OSError if the disk is full.

    wholes: `gathered` of this file and of those that follow.
    """
    ordered = in_order(tensors)
    header = _header(ordered)
    start = [len(header).to_bytes(8, "little"), header]
    return write_file(path, chain(start, (bytes_of(next(wholes)) for _ in ordered)))


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
        entries[name] = {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % ALIGNMENT)


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Return what the format calls a dtype, as the library writes it."""
    header = save({"": torch.empty(0, dtype=dtype)})[8:]
    return str(json.loads(header)[""]["dtype"])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor: a view if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
