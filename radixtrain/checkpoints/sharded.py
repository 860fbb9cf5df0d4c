"""Tensors of which every rank holds a part, by rows (torch's `DTensor`, as FSDP2 shards weights), and whole ones.

Whoever needs the whole gathers one tensor at a time, on all ranks in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: object) -> bool:
    """Whether each rank holds a part of it. Its shape is that of the whole."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank, each of which calls this; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor, which may be nothing; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: object) -> Tensor:
    """A whole tensor, sharded as another one of its shape and on its device, in memory of its own.

    Nothing is sent: every rank has the whole. The tensor itself if the other one is not sharded.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    assert like.placements == (Shard(0),), "fully_shard divides rows among the ranks of one mesh"
    mesh = like.device_mesh
    rank, parts = mesh.get_local_rank(), tensor.chunk(mesh.size())
    mine = parts[rank] if rank < len(parts) else tensor[:0]  # fewer rows than ranks
    held = mine.to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(held, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def parts_like(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor sharded as the one of its name, if there is one."""
    return {name: part_like(tensor, like.get(name)) for name, tensor in tensors.items()}


def place_in_memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """What two tensors that start at the same memory have in common, on every rank or on none; None without memory.

    A rank that holds no rows of a weight still has its padding in memory, but nothing of a moment of the optimizer.
    """
    if not isinstance(tensor, DTensor):
        return (tensor.device, tensor.data_ptr()) if tensor.numel() else None
    held = tensor.to_local()
    memory = held.untyped_storage()
    return (held.device, memory.data_ptr(), held.storage_offset()) if memory.nbytes() else None


class Gathering:
    """Sharded tensors that one rank needs whole, one at a time, while the others help.

    tensors: in the order in which they are needed, on all ranks; those that are not sharded are passed over.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._left = deque(tensor for tensor in tensors if is_sharded(tensor))

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of the next sharded tensor; any other tensor as it is."""
        if not is_sharded(tensor):
            return tensor
        expected = self._left.popleft()
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), "gathered in another order"
        try:
            return whole(tensor)
        except BaseException:  # another rank has ended: nobody is left to gather with
            self._left.clear()
            raise

    def finish(self) -> None:
        """Take part in gathering what is left: everything if this rank needs none, the rest after an error."""
        while self._left:
            whole(self._left.popleft())
