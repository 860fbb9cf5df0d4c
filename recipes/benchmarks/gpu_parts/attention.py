"""How fast, and how exact, is the attention of one layer? Every strategy and kernel side by side on the same plans.

Three plans of as many unique tokens: one prompt for all; three levels; and a comb, a trunk with 200 forks, on which
`cascade` makes 200 calls. Heads are those of Qwen3-4B and 8B: 32 for queries, 8 for keys, 128 wide. FlexAttention on
the same mask comes last, because its compiler is slow.

Errors are those of output, dq, dk and dv of the first group of heads, against float64; beside them those of
flash-attention as its paper has it, in the same dtype. The operations of a rate are those that the mask asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_parts.equivalence import ways
from gpu_parts.flex import FlexTree
from gpu_parts.run import Run, seconds_of
from torch import Tensor

from radixtrain.attention import tree_attention
from radixtrain.kernels.experimental.tree_tiles import tile_sizes
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["HEADS", "PART", "PLANS", "TINY_HEADS", "TINY_PLANS", "attention", "comb", "one_prompt", "three_levels"]

PART = "attention"
SLOW = ("reference", "eager")  # the specification and a loop of products: not for speed
OWN = 1_000_000  # the first token that is in no trunk
PASSES = 3.5  # a forward pass is 2 products of matrices, a backward pass 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Heads(NamedTuple):
    """Of queries, of keys and values, and how wide."""

    query: int
    key: int
    dim: int


HEADS, TINY_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)


@dataclass(frozen=True, eq=False)
class Truth:
    """What the first group of heads should give, and how far an ordinary kernel is from it.

    exact: output, dq, dk and dv, float64. ordinary: relative errors of these.
    """

    exact: list[Tensor]
    ordinary: list[float]
    group: int  # query heads of it


@dataclass(frozen=True, eq=False)
class Inputs:
    """q, dout: (U, N, H). k, v: (U, K, H)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def step(self, attend: Attend) -> tuple[Tensor, ...]:
        """Output, dq, dk and dv."""
        heads = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out = attend(*heads)
        return out.detach(), *torch.autograd.grad(out, heads, self.dout)

    @torch.no_grad()
    def forward(self, attend: Attend) -> Tensor:
        return attend(self.q, self.k, self.v)


def one_prompt(prompt: int, own: int, number: int) -> PrefixPlan:
    """Sequences of `prompt` shared and `own` tokens."""
    return plan_of([[*range(prompt), *_own(index, own)] for index in range(number)])


def three_levels(trunk: int, middle: int, own: int, groups: int, of_group: int) -> PrefixPlan:
    """A trunk for all, a middle for each group, and tokens of each sequence's own."""
    middles = [[*range(trunk), *_own(1000 + index, middle)] for index in range(groups)]
    return plan_of([[*middles[index // of_group], *_own(index, own)] for index in range(groups * of_group)])


def comb(forks: int, between: int, own: int, longest: int = 0) -> PrefixPlan:
    """A trunk from which a sequence forks after every `between` tokens; the last one has `longest` tokens more."""
    trunk = list(range(forks * between))
    lengths = [own + (longest if fork == forks - 1 else 0) for fork in range(forks)]
    return plan_of([[*trunk[: (fork + 1) * between], *_own(fork, length)] for fork, length in enumerate(lengths)])


def _own(index: int, number: int) -> list[int]:
    """Tokens that no other index has, and no trunk."""
    return [OWN + index] * number


def plan_of(sequences: list[list[int]]) -> PrefixPlan:
    cu_seqlens = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    return build_prefix_plan(np.concatenate(sequences), cu_seqlens)


PLANS: dict[str, Callable[[], PrefixPlan]] = {
    "one prompt": partial(one_prompt, 2048, 256, 32),
    "three levels": partial(three_levels, 1024, 128, 256, 8, 4),
    "comb of 200 forks": partial(comb, 200, 25, 26, 40),
}
TINY_PLANS: dict[str, Callable[[], PrefixPlan]] = {
    "one prompt": partial(one_prompt, 32, 8, 4),
    "three levels": partial(three_levels, 16, 8, 4, 4, 4),
    "comb of 4 forks": partial(comb, 4, 8, 7, 4),
}


def attention(run: Run, plans: dict[str, Callable[[], PrefixPlan]], heads: Heads) -> None:
    """Each plan on every way that runs here, then FlexAttention on each plan."""
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32  # Triton's interpreter takes no bfloat16
    found = [way for way in ways(run, PART, dtype, heads.dim) if not _is_left_out(run, way)]
    truths: dict[str, tuple[PrefixPlan, TreeLayout, Inputs, Truth]] = {}
    for name, make in plans.items():
        if not run.has_time(f"{PART} {name}"):
            return
        plan = make()
        tiles = tile_sizes(heads.dim, dtype) if ("tree", "auto") in found else None
        layout = TreeLayout.from_plan(plan, tiles=tiles).to(run.device)
        inputs = _inputs(plan.num_unique_tokens, heads, dtype, run.device)
        truths[name] = plan, layout, inputs, _truth(layout, inputs)
        for strategy, kernel in found:
            attend = partial(tree_attention, plan=layout, attention=strategy, kernel=kernel)
            _measure(run, f"{name}, {strategy} {kernel}", plan, inputs, truths[name][-1], attend)
    _flex(run, truths)


def _is_left_out(run: Run, way: tuple[str, str]) -> bool:
    """On a GPU, what is there to be read and not to be fast."""
    if run.device.type == "cpu" or not {*way} & {*SLOW}:
        return False
    run.leave_out(f"{PART} with {way[0]} {way[1]}", "it is the specification, and too slow for these plans")
    return True


def _flex(run: Run, plans: dict[str, tuple[PrefixPlan, TreeLayout, Inputs, Truth]]) -> None:
    flex: FlexTree | None = None
    for name, (plan, layout, inputs, truth) in plans.items():
        case = f"{name}, FlexAttention"
        if not run.has_time(f"{PART} {case}", needed=run.seconds / 20):
            return
        try:
            if flex is None or len(flex.ends) != layout.num_rows:
                flex = FlexTree(layout.num_rows, run.device)
            flex.take(layout.row_subtree_ends)
            make = partial(flex.take, layout.row_subtree_ends)
            mask = seconds_of(make, run.device)
        except Exception as error:  # of a compiler
            run.leave_out(f"{PART} {case}", error)
            continue
        _measure(run, case, plan, inputs, truth, flex.attend, mask_seconds=mask)


def _measure(
    run: Run,
    case: str,
    plan: PrefixPlan,
    inputs: Inputs,
    truth: Truth,
    attend: Attend,
    mask_seconds: float | None = None,
) -> None:
    """Forward; then errors, and forward and backward, if there is a backward pass here."""
    try:
        forward = seconds_of(partial(inputs.forward, attend), run.device)
        measures = {"forward_milliseconds": forward * 1e3, **_errors([inputs.forward(attend)], truth)}
    except Exception as error:  # a kernel's; the others are still to be measured
        return run.leave_out(f"{PART} {case}", error)
    try:
        measures |= _errors(inputs.step(attend), truth)
        step = seconds_of(partial(inputs.step, attend), run.device)
    except Exception as error:
        run.leave_out(f"{PART} {case}, backward", error)
    else:
        operations = PASSES * 4 * inputs.q.shape[1] * inputs.q.shape[2] * num_pairs(plan)
        measures |= {"step_milliseconds": step * 1e3, "teraflops_per_second": operations / step / 1e12}
        if mask_seconds is not None:
            measures["step_with_mask_milliseconds"] = (step + mask_seconds) * 1e3
    if mask_seconds is not None:
        measures["mask_milliseconds"] = mask_seconds * 1e3
    run.found(PART, case, **measures)


def num_pairs(plan: PrefixPlan) -> int:
    """(query, key) pairs that the tree mask shows: every row has as many keys as its place in its sequence."""
    return int((plan.position_ids[: plan.num_unique_tokens].astype(np.int64) + 1).sum())


def _inputs(num_rows: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    of_heads = (heads.query, heads.key, heads.key, heads.query)
    return Inputs(
        *(torch.randn(num_rows, n, heads.dim, device=device, generator=generator).to(dtype) for n in of_heads)
    )


def _truth(layout: TreeLayout, inputs: Inputs) -> Truth:
    """Of the first group of heads only: float64 scores of all heads are tens of gigabytes."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    mask, scale = tree_mask(layout.row_subtree_ends), inputs.q.shape[2] ** -0.5
    first = [x[:, :n] for x, n in ((inputs.q, group), (inputs.k, 1), (inputs.v, 1), (inputs.dout, group))]
    wide = Inputs(*(x.double() for x in first))
    exact = wide.step(partial(reference_attention, mask_UU=mask, scoring=Scoring(scale)))
    out, _, *grads = flash_attention_by_the_book(*first, mask, scale)
    errors = [relative_error(one, other) for one, other in zip((out, *grads), exact, strict=True)]
    return Truth(list(exact), errors, group)


def _errors(found: Any, truth: Truth) -> dict[str, float]:
    """Of only the output, or of output, dq, dk and dv: the worst relative error, and the worst over ordinary."""
    heads = (truth.group, truth.group, 1, 1)
    pairs = list(zip(found, truth.exact, heads, strict=False))
    errors = [relative_error(one[:, :n], exact) for one, exact, n in pairs]
    ratios = [error / ordinary for error, ordinary in zip(errors, truth.ordinary, strict=False)]
    return {"worst_error": _worst(errors), "error_ratio": _worst(ratios)}


def _worst(errors: list[float]) -> float:
    """A NaN is worse than any number."""
    return max(errors, key=lambda error: (error != error, error))
