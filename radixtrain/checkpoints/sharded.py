"""Tensors of which every rank holds a part, by rows (torch's `DTensor`, as FSDP2 shards weights), and whole ones.

Whole tensors are gathered one at a time, on all ranks in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

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
    """Shard a whole tensor as another one of its shape, on that one's device, in memory of its own.

    Nothing is sent: every rank has the whole. Returns the tensor itself if the other one is not sharded.
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
    """Shard each tensor as the one of its name, if there is one."""
    return {name: part_like(tensor, like.get(name)) for name, tensor in tensors.items()}


def place_in_memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal for tensors that share memory, alike on all ranks; None for a tensor without memory.

    A rank that holds no rows of a weight still has its padding in memory, but nothing of a moment of the optimizer.
    """
    if not isinstance(tensor, DTensor):
        return (tensor.device, tensor.data_ptr()) if tensor.numel() else None
    held = tensor.to_local()
    memory = held.untyped_storage()
    return (held.device, memory.data_ptr(), held.storage_offset()) if memory.nbytes() else None


class Gathering:
    """Sharded tensors that one rank needs whole, one at a time, while the others help.

    tensors: in the order in which they are needed, on all ranks; those that are not sharded are skipped.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._left = deque(tensor for tensor in tensors if is_sharded(tensor))

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of the next sharded tensor; any other tensor unchanged."""
        if not is_sharded(tensor):
            return tensor
        expected = self._left.popleft()
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), "gathered in another order"
        try:
            return whole(tensor)
        except BaseException:  # another rank has ended, so gathering is impossible
            self._left.clear()
            raise

    def finish(self) -> None:
        """Help to gather what is left: everything if this rank needs none, the rest after an error."""
        while self._left:
            whole(self._left.popleft())
