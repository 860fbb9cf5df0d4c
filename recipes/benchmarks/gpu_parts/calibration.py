"""The rates of `radixtrain/tree/cost_model.py`, measured: whether the fixed ones choose as well on this device.

A few batches are timed under every strategy, forward and backward, and the rates are fitted to the times by least
squares of the relative errors, none below 0. On a GPU they are timed in two sizes: short ones take as long as their
calls, and only long ones show what a pair and an element take.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from radixtrain.attention import choose_attention, tree_attention
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.step_cost import ModelDimensions, step_cost_of
from radixtrain.timing import non_negative_fit, seconds_of
from radixtrain.tree.cost_model import CHOICES, Rates, StepCost, attention_work
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["calibrate"]

REPEATS = 4  # keep the minimum: other load can only slow a run down
ROWS = 512  # of the matrix product that is timed, on a CPU


def calibrate(model: nn.Module) -> StepCost:
    """As `step_cost_of`, by rates that are measured on the device of the model's weights.

    Recurrent layers cost what is known of their kind, relative to a matrix product.
    """
    cost, weight = step_cost_of(model), next(model.parameters())
    options = {"device": weight.device, "dtype": weight.dtype}
    kernel = choose_attention("cascade", "auto", weight.device, weight.dtype, cost.head_dim).kernel
    flop = _seconds_per_flop(ModelDimensions.of(parts_of(model).base.config).hidden_size, options)
    return replace(cost, rates=_rates(cost, kernel, flop, options))


def _rates(cost: StepCost, kernel: str, flop: float, options: dict[str, Any]) -> Rates:
    """The measured rates. flop: seconds of a floating-point operation. options: of random tensors."""
    counts, seconds = [], []
    for plan in _batches(_lengths(options["device"])):
        steps = _attention_steps(cost, kernel, TreeLayout.from_plan(plan).to(options["device"]), options)
        counts += [cost.counts(attention_work(plan, strategy, cost.on_host)) for strategy in CHOICES]
        seconds += [_fastest(step, options) for step in steps]
    call, rectangle, pair, element = non_negative_fit(np.array(counts, dtype=np.float64), np.array(seconds))
    runs, slower = cost.rates.runs, flop / cost.rates.flop
    if runs is not None:
        runs = replace(runs, call=runs.call * slower, row=runs.row * slower, state=runs.state * slower)
    return Rates(call=call, rectangle=rectangle, pair=pair, element=element, flop=flop, runs=runs)


def _lengths(device: torch.device) -> tuple[int, ...]:
    """How many times as long the sequences are: 16,000 to 40,000 rows fill a GPU."""
    return (1, 32) if device.type == "cuda" else (1,)


def _batches(sizes: Sequence[int]) -> Iterator[PrefixPlan]:
    """Nothing shared, in long and in short sequences; one prompt; a deep tree; accidental sharing. In each size."""
    rng = np.random.default_rng(0)
    for longer in sizes:

        def ids(length: int, longer: int = longer) -> list[int]:
            return rng.integers(100, 10_000, length * longer).tolist()

        trunk = ids(384)
        yield _plan([ids(256), ids(250), ids(131)])
        yield _plan([ids(int(length)) for length in rng.integers(4, 40, 48)])
        yield _plan([trunk + ids(int(length)) for length in rng.integers(8, 64, 24)])
        yield _plan([trunk[: 24 * (n + 1) * longer] + ids(12) for n in range(16)])
        yield _plan([[int(token) for token in rng.integers(0, 4, 3)] + ids(24) for _ in range(48)])


def _plan(sequences: list[list[int]]) -> PrefixPlan:
    bounds = np.cumsum([0, *map(len, sequences)])
    return build_prefix_plan(np.concatenate([np.array(ids) for ids in sequences]), bounds)


def _attention_steps(
    cost: StepCost, kernel: str, layout: TreeLayout, options: dict[str, Any]
) -> Iterator[Callable[[], object]]:
    """Attention of random rows, forward and backward, by each strategy."""
    generator = torch.Generator(options["device"]).manual_seed(0)
    heads = cost.num_heads, cost.num_key_value_heads, cost.num_key_value_heads
    shapes = [(layout.num_rows, n, cost.head_dim) for n in heads]
    q, k, v = (torch.randn(shape, generator=generator, **options).requires_grad_() for shape in shapes)
    dout = torch.randn(q.shape, generator=generator, **options)
    for strategy in CHOICES:

        def run(strategy: str = strategy) -> object:
            out = tree_attention(q, k, v, layout, attention=strategy, kernel=kernel)
            return torch.autograd.grad(out, (q, k, v), dout)

        yield run


def _seconds_per_flop(hidden_size: int, options: dict[str, Any]) -> float:
    """Measured on a matrix as wide as an MLP, forward and backward."""
    generator = torch.Generator(options["device"]).manual_seed(0)
    width, rows = 4 * hidden_size, ROWS * _lengths(options["device"])[-1]
    x, weight, dout = (
        torch.randn(shape, generator=generator, **options)
        for shape in ((rows, hidden_size), (width, hidden_size), (rows, width))
    )
    x.requires_grad_(), weight.requires_grad_()
    seconds = _fastest(lambda: torch.autograd.grad(nn.functional.linear(x, weight), (x, weight), dout), options)
    return seconds / (6.0 * rows * hidden_size * width)


def _fastest(run: Callable[[], object], options: dict[str, Any]) -> float:
    """Seconds of the fastest run, after one that does not count."""
    run()
    return min(seconds_of(run, options["device"]) for _ in range(REPEATS))
