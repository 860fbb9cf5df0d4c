"""Merges of pieces that Inductor compiled for a CPU beside eager ones; prints how many compilations they took.

Run with ATEN_CPU_CAPABILITY=default: then both call the same `exp` and `log1p`, those of the C library.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config

from radixtrain.kernels import merge_attention
from radixtrain.kernels.merge_attention import fold_sinks, merge_piece

config.cpp.simdlen = 1  # no vectors, whose `exp` differs in the last bit
SIZES = ((700, 300), (400, 390), (330, 330), (90, 1), (70, 20), (900, 800))  # all rows, those of the piece
compiled: dict[Any, Any] = {}


def as_on_cuda(function: Callable[..., Any], *tensors: Tensor) -> Any:
    compiled.setdefault(function, torch.compile(function, dynamic=True))
    for x in tensors:
        torch._dynamo.mark_static(x, [*range(1, x.ndim)])
    return compiled[function](*tensors)


def merged(kind: str, out: Tensor, lse: Tensor, length: int, others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse, number = out.clone(), lse.clone(), len(out)
    if kind == "sinks":
        merge_attention.fused(fold_sinks, out, lse.t(), others[1][:, 0].contiguous())
    else:
        rows = slice(number - length, number) if kind == "slice" else torch.arange(number)[-length:].flip(0)
        merge_piece(out, lse, rows, *others)
    return out, lse


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    for dtype, kind, (number, length) in product((torch.bfloat16, torch.float32), ("slice", "indices", "sinks"), SIZES):
        wide = torch.promote_types(dtype, torch.float32)
        out, other = (torch.randn(rows, 4, 16).to(dtype) for rows in (number, length))
        lse, other_lse = (3 * torch.randn(4, rows, dtype=wide) for rows in (number, length))
        given = kind, out, lse, length, (other, other_lse)
        expected = merged(*given)
        merge_attention.fused, eager = as_on_cuda, merge_attention.fused
        found = merged(*given)
        merge_attention.fused = eager
        assert all(map(torch.equal, found, expected)), (dtype, kind, number, length)
    print(counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
