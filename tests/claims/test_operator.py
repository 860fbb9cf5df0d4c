"""`radixtrain::tree_attention`, an operator of torch: one graph for every tree, with the gradients of eager mode.

A compiled graph holds the two tensors of the plan and no number of it. U rows, N query heads, K key/value heads, H head
dim, D hidden.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from radixtrain.attention import EVERYWHERE, tree_attention
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan
from tests.support import cases
from tests.support.batches import NESTED, agent, assert_exact, attention_inputs, comb, plan_of, with_gradients

OPERATOR = torch.ops.radixtrain.tree_attention.default
SINKS = torch.linspace(-1, 2, 4, dtype=torch.float64)
REQUESTS: dict[str, dict[str, Any]] = {
    **{name: {"attention": name} for name in EVERYWHERE},
    "auto, with a window that binds": {"window": 2},
    "path, window and sinks": {"attention": "path", "window": 3, "sinks": SINKS},
    "expand, window and soft-cap": {"attention": "expand", "window": 3, "softcap": 0.8},
    "cascade, sinks and soft-cap": {"attention": "cascade", "sinks": SINKS, "softcap": 0.8, "scale": 0.3},
    "reference, everything": {"attention": "reference", "window": 2, "sinks": SINKS, "softcap": 0.8},
    **{f"{name}, both ways": {"attention": name, "both_ways": True} for name in ("cascade", "path", "reference")},
    "path, both ways and a window": {"attention": "path", "both_ways": True, "window": 2, "sinks": SINKS},
    "the eager kernel": {"kernel": "eager"},
}
# Ten tries of other sizes, depths and numbers of calls.
TRIES = {
    "one prompt": [[*range(30), 100 + n, n] for n in range(6)],
    **{f"an agent of {turns} turns": agent(turns, observed=4, answered=2) for turns in (3, 5, 8, 13, 20)},
    "nothing shared": [[1, 2, 3, 4], [2, 3], [3, 4, 5]],
    "one row": [[7]],
    "nested": NESTED,
    "a comb": comb(12),
}


def with_block(plan: PrefixPlan) -> TreeLayout:
    """Rows 1 and 2, which one sequence has back to back, attend in both directions."""
    block = np.full(plan.num_rows, -1)
    block[1:3] = 0
    return TreeLayout.from_plan(plan, block_of_row=block)


def eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: TreeLayout, options: dict[str, Any]) -> Tensor:
    return tree_attention(q, k, v, layout, **{**options, "sinks": sinks})


def by_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: TreeLayout, options: dict[str, Any]
) -> Tensor:
    out: Tensor = OPERATOR(q, k, v, sinks, layout.host, layout.rows, *request(options))[0]
    return out


def request(options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the operator after the plan's two tensors."""
    given = {"attention": "auto", "kernel": "auto", "scale": 8**-0.5, "softcap": None, "window": None} | options
    return *(given[name] for name in ("attention", "kernel", "scale", "softcap", "window")), "both_ways" in options


@pytest.mark.parametrize("name", REQUESTS)
def test_gradients_are_those_of_eager_mode(name: str) -> None:
    options = REQUESTS[name]
    for sequences in TRIES.values():
        plan = plan_of(sequences)
        layout = with_block(plan) if "both_ways" in options and plan.num_rows > 2 else TreeLayout.from_plan(plan)
        tensors = attention_inputs(plan, torch.float64)
        found = [
            with_gradients(
                lambda q, k, v, sinks=None, call=call, layout=layout: call(q, k, v, sinks, layout, options),
                tensors,
                *([options["sinks"]] if "sinks" in options else []),
            )
            for call in (by_operator, eager)
        ]
        assert_exact(*found, name)


@pytest.mark.parametrize("name", cases(REQUESTS, ["cascade", "path, window and sinks", "path, both ways and a window"]))
def test_what_torch_asks_of_an_operator(name: str) -> None:
    """Schema, autograd, fakes of the right shapes and strides, and a trace with dynamic sizes."""
    plan, options = plan_of(NESTED), REQUESTS[name]
    layout = with_block(plan)
    q, k, v = (x.requires_grad_() for x in attention_inputs(plan, torch.float64)[:3])
    sinks = options["sinks"].clone().requires_grad_() if "sinks" in options else None
    torch.library.opcheck(OPERATOR, (q, k, v, sinks, layout.host, layout.rows, *request(options)))


class Layer(torch.nn.Module):
    """Projections, tree attention and a residual. Grouped heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(16, heads * 8) for heads in (4, 2, 2))
        self.back = torch.nn.Linear(32, 16)
        self.sinks = torch.nn.Parameter(SINKS.clone()) if options.pop("sinks", False) else None
        self.options = options
        self.double()

    def forward(self, x_UD: Tensor, layout: TreeLayout) -> Tensor:
        heads = (project(x_UD).unflatten(-1, (-1, 8)) for project in self.projections)
        attended = tree_attention(*heads, layout, sinks=self.sinks, **self.options)
        return x_UD + self.back(attended.flatten(1))


@pytest.fixture
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled_yet")
@pytest.mark.parametrize("options", [{}, {"window": 3, "sinks": True}], ids=["cascade", "window and sinks"])
def test_one_graph_for_every_tree(options: dict[str, Any]) -> None:
    """No break and no recompilation, not even for a single row, whose size is marked as one like any other."""
    layer = Layer(**options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for name, sequences in TRIES.items():
        plan = plan_of(sequences)
        layout = TreeLayout.from_plan(plan)
        x = torch.randn(plan.num_rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch._dynamo.decorators.mark_unbacked(x, 0)
        found = []
        for call in (layer, compiled):
            out = call(x, layout)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [*layer.parameters()])])
        assert_exact(found[1], found[0], name)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
