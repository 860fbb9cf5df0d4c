"""Tensors of which every rank holds a part, by rows (torch's `DTensor`, as FSDP2 shards weights)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: object) -> bool:
    """Return whether each rank holds a part of it. Its shape is that of the whole."""
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
