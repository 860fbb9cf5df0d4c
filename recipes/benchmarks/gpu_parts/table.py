"""Table 1 of DualKV (github.com/amazon-science/dualkv-flash-attn-for-rl), which its authors measured on one H100.

One layer of attention with the heads of Qwen3-4B and 8B: N answers of 2,048 tokens after one prompt of P, float16,
forward and backward of one call. The operations of a rate are those that the mask asks for.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gpu_parts.bars import DUALKV, OF_HOPPER
from gpu_parts.equivalence import ways
from gpu_parts.run import Run, median_seconds
from torch import Tensor

from radixtrain.attention import tree_attention
from radixtrain.timing import peak_bytes, seconds_of
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan

__all__ = ["HEADS", "TINY_HEADS", "table"]

PASSES = 3.5  # a forward pass is 2 products of matrices, a backward pass 5


class Heads(NamedTuple):
    """Of queries, of keys and values, and how wide."""

    query: int
    key: int
    dim: int


HEADS, TINY_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)


def table(run: Run, heads: Heads, shrink: int = 1) -> None:
    """Each row on the kernels of which something is asked, by `cascade`. shrink: all lengths are divided by it."""
    kernels = [
        kernel
        for strategy, kernel in ways(run, "table", torch.float16, heads.dim)
        if strategy == "cascade" and re.fullmatch(f"torch|{OF_HOPPER}", kernel)
    ]
    for number, prompt, published, *_ in DUALKV:
        ids = [[*range(prompt // shrink), *[1_000_000 + row] * (2048 // shrink)] for row in range(number)]
        plan = build_prefix_plan(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))
        layout, generator = TreeLayout.from_plan(plan).to(run.device), torch.Generator(run.device).manual_seed(0)
        shapes = [(layout.num_rows, n, heads.dim) for n in (heads.query, heads.key, heads.key, heads.query)]
        tensors = [torch.randn(shape, device=run.device, generator=generator).half() for shape in shapes]
        pairs = int((plan.position_ids.astype(np.int64) + 1).sum())
        teraflops = PASSES * 4 * heads.query * heads.dim * pairs / 1e12
        for kernel in kernels:
            case = f"N {number}, P {prompt // 1024}k, cascade {kernel}"
            try:
                attend = partial(tree_attention, plan=layout, attention="cascade", kernel=kernel)
                measures = _ten_steps(run, f"table {case}", partial(_step, attend, tensors))
            except Exception as error:  # a kernel's; the others are still to be measured
                run.leave_out(f"table {case}", error)
                continue
            if measures:
                rate = teraflops / measures["milliseconds"] * 1e3
                run.found("table", case, **measures, published_milliseconds=published, teraflops_per_second=rate)


def _ten_steps(run: Run, case: str, step: Callable[[], object]) -> dict[str, float]:
    """Median and peak of a step; nothing if ten do not fit into the time."""
    if not run.has_time(case):
        return {}
    peak = peak_bytes(step, run.device) / 1e9
    if not run.has_time(case, needed=11 * seconds_of(step, run.device)):
        return {}
    seconds = median_seconds(step, run.device, at_least=0, rounds=10)
    return {"milliseconds": seconds * 1e3, "peak_gigabytes": peak}


def _step(attend: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    return torch.autograd.grad(attend(*leaves), leaves, tensors[3])
