"""Are the kernels exact on this device, and how fast? Every strategy with every installed kernel.

- equivalence: gradients of a small Qwen3 in bfloat16 against a float64 run of the ordinary model, beside the error of
  the ordinary bfloat16 model.
- attention: one layer on three trees of as many unique tokens: one prompt for all; three levels; and a comb, a trunk
  with 200 forks, on which `cascade` makes 200 calls. Heads are those of Qwen3-4B and 8B. Errors are those of the first
  group of heads; the operations of a rate are those that the mask asks for.
- rows: the segment sum beside a copy of as many bytes, at shapes of Table 6 of the RadixMLP paper, in bfloat16 in place
  of its float16, with uniform indices. It counts each row read once and each result written once.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_parts.run import Run, median_seconds
from torch import Tensor

from radixtrain import RadixCollator, verify_equivalence
from radixtrain.attention import EVERYWHERE, choose_attention, tree_attention
from radixtrain.bench.cells import Cell, ModelShape, build_model, features_of_cell
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.rows import sum_rows
from radixtrain.kernels.triton_door import experimental
from radixtrain.kernels.varlen import KERNELS, varlen_kernel
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["HEADS", "PLANS", "SUMS", "TINY_HEADS", "TINY_PLANS", "TINY_SUMS", "attention", "equivalence", "rows"]

PASSES = 3.5  # a forward pass is 2 products of matrices, a backward pass 5
Way = tuple[str, str]  # strategy, kernel
Plans = dict[str, Callable[[], PrefixPlan]]


class Heads(NamedTuple):
    """Of queries, of keys and values, and how wide."""

    query: int
    key: int
    dim: int


HEADS, TINY_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
Sum = tuple[int, int, int, torch.dtype]  # rows of the result, elements of a row, rows that are summed, dtype
SUMS: tuple[Sum, ...] = tuple(
    (*shape, dtype)
    for shape in ((16_000, 1024, 12_000), (16_000, 1024, 70_000), (100_000, 2048, 500_000))
    for dtype in (torch.float32, torch.bfloat16)
)
TINY_SUMS: tuple[Sum, ...] = ((10, 16, 20, torch.float32), (10, 16, 40, torch.bfloat16))


def ways(run: Run, part: str, dtype: torch.dtype, head_dim: int) -> Iterator[Way]:
    """Every strategy with every kernel that takes such tensors here; the others are left out with the reason."""
    asked = [(strategy, kernel) for kernel in KERNELS for strategy in EVERYWHERE if strategy != "reference"]
    refused = set[str]()
    for strategy, kernel in (*asked, ("reference", "auto"), ("tree", "auto")):
        try:
            choose_attention(strategy, kernel, run.device, dtype, head_dim)
            if kernel != "auto":
                varlen_kernel(kernel, run.device)
        except (ValueError, ImportError, RuntimeError) as error:
            name = strategy if kernel == "auto" else kernel
            if name not in refused:
                refused.add(name)
                run.leave_out(f"{part} with {name}", str(error).partition("; ")[0])
        else:
            yield strategy, kernel


def equivalence(run: Run, shape: ModelShape, prompt_length: int) -> None:
    """Every way on one model and one nested batch."""
    model = build_model(shape, run.device, torch.bfloat16, "sdpa")
    features = features_of_cell(Cell(shape, prompt_length, prompt_length // 8, 10, tree="nested"))
    for strategy, kernel in ways(run, "equivalence", torch.bfloat16, shape.head_dim):
        case = f"{strategy}, {kernel}"
        if not run.has_time(f"equivalence {case}"):
            return
        collator = RadixCollator(tree_tiles=strategy == "tree")
        options = {"attention": strategy, "kernel": kernel, "collator": collator, "precisions": ["bfloat16"]}
        measures: dict[str, Any] = {"passed": False, "median_ratio": math.nan}
        try:
            rung = verify_equivalence(model, features, **options)["bfloat16"]
            measures = {"passed": rung.passed, "median_ratio": rung.median_ratio, "worst_error": rung.worst.radix}
            measures["ordinary_worst_error"] = rung.worst_ordinary
        except Exception as error:  # a kernel that raises is a result too, and the others are still to be measured
            run.leave_out(f"equivalence {case}", error)
        run.found("equivalence", case, **measures)


def one_prompt(prompt: int, own: int, number: int) -> PrefixPlan:
    """Sequences of `prompt` shared and `own` tokens."""
    return plan_of([[*range(prompt), *[-index - 1] * own] for index in range(number)])


def three_levels(trunk: int, middle: int, own: int, groups: int) -> PrefixPlan:
    """A trunk for all, a middle for each group, and tokens of each of four sequences' own."""
    middles = [[*range(trunk), *[-group - 1] * middle] for group in range(groups)]
    return plan_of([[*middles[index // 4], *[-index - 100] * own] for index in range(groups * 4)])


def comb(forks: int, between: int, own: int) -> PrefixPlan:
    """A trunk from which a sequence forks after every `between` tokens."""
    trunk = list(range(forks * between))
    return plan_of([[*trunk[: (fork + 1) * between], *[-fork - 1] * own] for fork in range(forks)])


def plan_of(sequences: list[list[int]]) -> PrefixPlan:
    """Tokens below 0 are in no trunk."""
    tokens = np.concatenate(sequences)
    return build_prefix_plan(np.where(tokens < 0, 1_000_000 - tokens, tokens), np.cumsum([0, *map(len, sequences)]))


PLANS: Plans = {
    "one prompt": partial(one_prompt, 2048, 256, 32),
    "three levels": partial(three_levels, 1024, 128, 256, 8),
    "comb of 200 forks": partial(comb, 200, 25, 26),
}
TINY_PLANS: Plans = {
    "one prompt": partial(one_prompt, 32, 8, 4),
    "three levels": partial(three_levels, 16, 8, 4, 4),
    "comb of 4 forks": partial(comb, 4, 8, 7),
}


def attention(run: Run, plans: Plans, heads: Heads) -> None:
    """Each plan on every way that runs here; on a GPU without the specifications, which are too slow."""
    on_gpu = run.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # Triton's interpreter takes no bfloat16
    slow = {"reference", "eager"} if on_gpu else set()
    asked = [way for way in ways(run, "attention", dtype, heads.dim) if not {*way} & slow]
    for name, make in plans.items():
        if not run.has_time(f"attention {name}"):
            return
        plan = make()
        tiles = experimental("tree_tiles").tile_sizes(heads.dim, dtype) if ("tree", "auto") in asked else None
        layout = TreeLayout.from_plan(plan, tiles=tiles).to(run.device)
        generator = torch.Generator(run.device).manual_seed(0)
        shapes = [(layout.num_rows, n, heads.dim) for n in (heads.query, heads.key, heads.key, heads.query)]
        tensors = [torch.randn(shape, device=run.device, generator=generator).to(dtype) for shape in shapes]
        exact, ordinary = _truth(layout, tensors)
        pairs = int((plan.position_ids.astype(np.int64) + 1).sum())  # that the tree mask shows
        operations = PASSES * 4 * heads.query * heads.dim * pairs
        for strategy, kernel in asked:
            attend = partial(tree_attention, plan=layout, attention=strategy, kernel=kernel)
            try:
                measures = _layer(run, attend, tensors, exact, ordinary)
            except Exception as error:  # a kernel's; the others are still to be measured
                run.leave_out(f"attention {name}, {strategy} {kernel}", error)
                continue
            rate = operations / measures["step_milliseconds"] / 1e9
            run.found("attention", f"{name}, {strategy} {kernel}", **measures, teraflops_per_second=rate)


def _layer(
    run: Run, attend: Callable[..., Tensor], tensors: list[Tensor], exact: list[Tensor], ordinary: list[float]
) -> dict[str, float]:
    pairs = zip(_step(attend, tensors), exact, strict=True)
    errors = [relative_error(x[:, : truth.shape[1]], truth) for x, truth in pairs]
    ratio = max((e / o for e, o in zip(errors, ordinary, strict=True)), key=lambda x: (x != x, x))  # a NaN is worst
    with torch.no_grad():
        forward = median_seconds(lambda: attend(*tensors[:3]), run.device)
    step = median_seconds(lambda: _step(attend, tensors), run.device)
    return {"forward_milliseconds": forward * 1e3, "step_milliseconds": step * 1e3, "error_ratio": ratio}


def _step(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
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


def rows(run: Run, shapes: tuple[Sum, ...]) -> None:
    """The segment sum of a gather's backward pass: torch's two ways, and ours in Triton if it runs here."""
    for num_rows, width, num_terms, dtype in shapes:
        case = f"[{num_rows}, {width}] of {num_terms} {str(dtype).removeprefix('torch.')}"
        if not run.has_time(f"rows {case}"):
            return
        generator = torch.Generator(run.device).manual_seed(0)
        x = torch.randn(num_terms, width, dtype=dtype, device=run.device, generator=generator)
        indices = torch.randint(num_rows, (num_terms,), device=run.device, generator=generator)
        num_bytes = (num_terms + num_rows) * width * dtype.itemsize
        source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=run.device)
        target = torch.empty_like(source)
        copy = median_seconds(partial(target.copy_, source), run.device)
        arms: dict[str, Callable[..., Tensor]] = {"torch": sum_rows}
        if run.device.type == "cuda":
            arms["Triton"] = lambda *given: experimental("rows_triton").sum_rows(*given)
        for name, arm in arms.items():
            try:
                took = median_seconds(partial(arm, x, indices, num_rows), run.device)
            except Exception as error:  # of a compiler, say
                run.leave_out(f"rows {case}, {name}", error)
                continue
            run.found("rows", f"{case}, {name}", microseconds=took * 1e6, share_of_copy=copy / took)
