"""One layer of attention: every strategy and kernel on three trees, and DualKV's table.

- attention: as many unique tokens each: one prompt for all; three levels; and a comb, a trunk with 200 forks, on which
  `cascade` makes 200 calls. Heads are those of Qwen3-4B and 8B. Errors are those of the first group of heads; the
  operations of a rate are those that the mask asks for.
- table: Table 1 of DualKV (github.com/amazon-science/dualkv-flash-attn-for-rl), which has been measured on one H100: N
  answers of 2,048 tokens after one prompt of P, float16, forward and backward of one call.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gpu_parts.bars import DUALKV, OF_HOPPER
from gpu_parts.equivalence import Way, ways
from gpu_parts.plans import Plans, one_prompt
from gpu_parts.run import Run, median_seconds
from torch import Tensor

from radixtrain.attention import tree_attention
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import flash_attention_by_the_book, relative_error
from radixtrain.timing import peak_bytes, seconds_of
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

__all__ = ["HEADS", "TINY_HEADS", "attention", "table"]

PASSES = 3.5  # a forward pass is 2 products of matrices, a backward pass 5
SLOW = ("reference", "eager")  # the specifications
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Heads(NamedTuple):
    """Of queries, of keys and values, and how wide."""

    query: int
    key: int
    dim: int


HEADS, TINY_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)


class Tree(NamedTuple):
    """A plan, on the device, and q, k, v and dout of its rows."""

    plan: PrefixPlan
    layout: TreeLayout
    tensors: list[Tensor]

    @classmethod
    def of(cls, plan: PrefixPlan, heads: Heads, device: torch.device, dtype: torch.dtype) -> "Tree":
        layout = TreeLayout.from_plan(plan).to(device)
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(layout.num_rows, n, heads.dim) for n in (heads.query, heads.key, heads.key, heads.query)]
        tensors = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]
        return cls(plan, layout, tensors)

    def attend_by(self, way: Way) -> Attend:
        strategy, kernel = way
        return partial(tree_attention, plan=self.layout, attention=strategy, kernel=kernel)

    def teraflops(self, heads: Heads) -> float:
        """Of forward and backward over the pairs that the tree mask shows."""
        pairs = int((self.plan.position_ids.astype(np.int64) + 1).sum())
        return PASSES * 4 * heads.query * heads.dim * pairs / 1e12


def attention(run: Run, plans: Plans, heads: Heads) -> None:
    """Each plan on every way that runs here; on a GPU without the specifications, which are too slow."""
    kinds = _kinds(run, "attention", torch.bfloat16, heads)
    for name, make in plans.items():
        tree = Tree.of(make(), heads, run.device, torch.bfloat16)
        exact, ordinary = _truth(tree.layout, tree.tensors)
        for kind, way in kinds.items():
            if not run.has_time(f"attention {name}, {kind}"):
                continue
            try:
                measures = _layer(run, tree.attend_by(way), tree.tensors, exact, ordinary)
            except Exception as error:  # a kernel's; the others are still to be measured
                run.leave_out(f"attention {name}, {kind}", error)
                continue
            rate = tree.teraflops(heads) / measures["step_milliseconds"] * 1e3
            run.found("attention", f"{name}, {kind}", **measures, teraflops_per_second=rate)


def table(run: Run, heads: Heads, shrink: int = 1) -> None:
    """Each row on the kernels of which something is asked, by `cascade`. shrink: all lengths are divided by it."""
    asked = re.compile(rf"^cascade (torch|{OF_HOPPER})$")
    kinds = {kind: way for kind, way in _kinds(run, "table", torch.float16, heads).items() if asked.match(kind)}
    for number, prompt, published, *_ in DUALKV:
        tree = Tree.of(one_prompt(prompt // shrink, 2048 // shrink, number), heads, run.device, torch.float16)
        for kind, way in kinds.items():
            case = f"N {number}, P {prompt // 1024}k, {kind}"
            try:
                step = partial(_step, tree.attend_by(way), tree.tensors)
                measures = _ten_steps(run, f"table {case}", step)
            except Exception as error:
                run.leave_out(f"table {case}", error)
                continue
            if measures:
                rate = tree.teraflops(heads) / measures["milliseconds"] * 1e3
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


def _kinds(run: Run, part: str, dtype: torch.dtype, heads: Heads) -> dict[str, Way]:
    """Every way that is fast enough here, by its name."""
    slow = {*SLOW} if run.device.type == "cuda" else set()
    found = [way for way in ways(run, part, dtype, heads.dim) if not {*way} & slow]
    return {" ".join(way).removesuffix(" auto"): way for way in found}  # those with a kernel of their own


def _layer(
    run: Run, attend: Attend, tensors: list[Tensor], exact: list[Tensor], ordinary: list[float]
) -> dict[str, float]:
    pairs = zip(_step(attend, tensors), exact, strict=True)
    errors = [relative_error(x[:, : truth.shape[1]], truth) for x, truth in pairs]
    ratio = max((e / o for e, o in zip(errors, ordinary, strict=True)), key=lambda x: (x != x, x))  # a NaN is worst
    with torch.no_grad():
        forward = median_seconds(lambda: attend(*tensors[:3]), run.device)
    step = median_seconds(lambda: _step(attend, tensors), run.device)
    peak = peak_bytes(lambda: _step(attend, tensors), run.device) / 1e9
    return {
        **{"forward_milliseconds": forward * 1e3, "step_milliseconds": step * 1e3},
        **{"peak_gigabytes": peak, "error_ratio": ratio},
    }


def _step(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """Output, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def _truth(layout: TreeLayout, tensors: list[Tensor]) -> tuple[list[Tensor], list[float]]:
    """In float64, and the errors of an ordinary kernel. Only the first group: scores of all heads are gigabytes."""
    group = tensors[0].shape[1] // tensors[1].shape[1]
    mask, scale = tree_mask(layout.row_subtree_ends), tensors[0].shape[2] ** -0.5
    first = [x[:, :n] for x, n in zip(tensors, (group, 1, 1, group), strict=True)]
    attend = partial(reference_attention, mask_UU=mask, scoring=Scoring(scale))
    exact = _step(attend, [x.double() for x in first])
    out, _, *grads = flash_attention_by_the_book(*first, mask, scale)
    return exact, [relative_error(x, truth) for x, truth in zip((out, *grads), exact, strict=True)]
