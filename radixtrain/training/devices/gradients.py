"""The gradient of a step: summed over its micro-batches, averaged once over ranks that each hold the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from radixtrain.distributed import ranks

BUCKET_BYTES = 25 << 20  # that are sent at once, as by torch's DDP


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
