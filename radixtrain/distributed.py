"""The processes that train together, and what they exchange. A single process is the case of one rank.

Every rank calls the same methods in the same order, whatever it found itself, and all get the same answer. Small
values travel over gloo, on the host, so that asking does not wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from radixtrain.errors import EndedElsewhere, UserError

Value = TypeVar("Value")

# NCCL's watchdog kills the process with a report of its own. What waits for a hanging rank over gloo says more, so it
# comes first: it has the time to report, and to end.
NCCL_LATER = timedelta(seconds=60)
BUCKET_BYTES = 25 << 20  # of gradients that are sent at once, as by torch's DDP
PATIENCE = timedelta(days=2)  # for work of hours on rank 0: before the first step, and in the export


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. rank: of this process, from 0. size: number of ranks.

    step_group, patient_group: of gloo, over all ranks. One waits as long as for a step, the other `PATIENCE`; None for
        a single process.
    sp_size: consecutive ranks that compute each micro-batch together. sp_group: those with this one, on the devices;
        None if each computes its own.
    """

    rank: int = 0
    size: int = 1
    step_group: Any = None
    patient_group: Any = None
    sp_size: int = 1
    sp_group: Any = None

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes files and prints for all."""
        return self.rank == 0

    @property
    def num_groups(self) -> int:
        """Count the groups of `sp_size` ranks, which divide the micro-batches of a step among them."""
        return self.size // self.sp_size

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Return the largest value of each number over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def total(self, *numbers: int) -> tuple[int, ...]:
        """Return the sum of each number over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on some rank."""
        return bool(self.largest(int(flag))[0])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor of any shape over the ranks, on its device; the tensor itself for one process.

        Does not wait for a device.
        """
        if self.size == 1:
            return tensor
        found = tensor.detach().clone()
        dist.all_reduce(found)
        return found

    def gather(self, value: Value, long_timeout: bool = False) -> list[Value]:
        """Return the value of every rank, by rank. value: anything that pickles. long_timeout: wait for hours."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group(long_timeout))
        return found

    def broadcast_from_rank0(self, make: Callable[[], Value], long_timeout: bool = False) -> Value:
        """Call `make` on rank 0 only and return its result, which has to pickle, on every rank.

        long_timeout: the other ranks wait for hours, not only as long as for a step.

        An error in it ends the other ranks too, with EndedElsewhere: rank 0 reports it.
        """
        if self.size == 1:
            return make()
        if not self.is_first:
            is_made, value = self._broadcast(None, long_timeout)
            if not is_made:
                raise EndedElsewhere
            return value
        try:
            value = make()
        except BaseException:
            self._broadcast((False, None), long_timeout)
            raise
        self._broadcast((True, value), long_timeout)
        return value

    def rank0_first(self, make: Callable[[], Value]) -> Value:
        """Call `make` on rank 0, then on the others, which find the files that rank 0 has written. Return its result.

        An error on rank 0 ends the others as in `broadcast_from_rank0`. They wait for hours if need be.
        """
        found: list[Value] = []
        self.broadcast_from_rank0(lambda: found.append(make()), long_timeout=True)
        return found[0] if found else make()

    def barrier(self) -> None:
        """Wait for all ranks, for hours if need be."""
        if self.size > 1:
            dist.barrier(group=self.patient_group)

    def _reduced(self, numbers: tuple[int, ...], operation: object) -> tuple[int, ...]:
        if self.size == 1:
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, operation, group=self.step_group)
        return tuple(found.tolist())

    def _broadcast(self, value: object, long_timeout: bool) -> Any:
        found = [value]
        dist.broadcast_object_list(found, src=0, group=self._group(long_timeout))
        return found[0]

    def _group(self, long_timeout: bool) -> Any:
        return self.patient_group if long_timeout else self.step_group


_joined: Ranks | None = None


def ranks() -> Ranks:
    """Return the ranks of this run: one until `join` has found the others."""
    return _joined or Ranks()


def join(timeout: timedelta) -> Ranks:
    """Find the ranks of torch.distributed's process group. Call it in each of them, once that exists.

    timeout: how long a rank waits for the others in a step, before it ends with an error.
    """
    global _joined  # as in torch.distributed, which has one default group per process
    if not dist.is_initialized() or dist.get_world_size() == 1:
        _joined = None
    elif _joined is None:
        groups = [dist.new_group(backend="gloo", timeout=each) for each in (timeout, PATIENCE)]
        _joined = Ranks(dist.get_rank(), dist.get_world_size(), *groups)
    return ranks()


def form_groups(sp_size: int, timeout: timedelta) -> None:
    """Let `sp_size` consecutive ranks compute each micro-batch together from now on. Call it on each rank after `join`.

    sp_size: divides the ranks, see `check_sp_size`. timeout: as for `join`.
    """
    global _joined
    if sp_size == 1:
        return
    here = ranks()
    wait = timeout + NCCL_LATER if dist.get_backend() == "nccl" else timeout
    starts = range(0, here.size, sp_size)  # every rank makes every group, as torch.distributed asks
    groups = [dist.new_group(list(range(start, start + sp_size)), timeout=wait) for start in starts]
    _joined = replace(here, sp_size=sp_size, sp_group=groups[here.rank // sp_size])


def check_sp_size(sp_size: int, num_ranks: int) -> None:
    """Raise UserError if `sp_size` does not divide the number of ranks."""
    if num_ranks % sp_size:
        fit = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise UserError(
            f"sp_size {sp_size}: this run has {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, which it has to "
            f"divide: {fit}; change it, or trainer.devices"
        )


def add_gradient(module: Any, is_sharded: bool, batch: dict[str, Any], divisor: float, is_last: bool) -> Tensor:
    """Add the gradient of a micro-batch, whose loss is divided by a number. Returns that loss, detached.

    module: with `loss_sum`. is_sharded: by FSDP2, which averages the gradient of every micro-batch over the ranks.
    is_last: of the step: after it, gradients are means over the ranks.
    """
    share: Tensor = module.loss_sum(batch) / divisor
    share.backward()
    if is_last and not is_sharded:
        average_gradients(module.parameters())
    return share.detach()


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over the ranks. Every rank calls this, with the same parameters in one order.

    A parameter that only some ranks have reached, such as an expert that no token of the others is routed to, counts
    as zero on the others. One that no rank has reached keeps the gradient None, which an optimizer skips.
    """
    if ranks().size == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    is_reached = ranks().largest(*(int(parameter.grad is not None) for parameter in trained))
    gradients = []
    for parameter, reached in zip(trained, is_reached, strict=True):
        if reached and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket]).div_(ranks().size)
        dist.all_reduce(flat)
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a sequence of tensors into lists of one dtype and about `BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket
