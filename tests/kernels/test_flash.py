"""The CUDA code path without CUDA: the classes that call the kernels, on the stand-ins of `cuda_stand_ins.py`."""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from radixtrain.kernels import efficient
from radixtrain.kernels.cpu_loops import EagerKernel
from radixtrain.kernels.efficient import EfficientKernel
from radixtrain.kernels.flash import (
    CudnnKernel,
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    FlashAttnKernel,
    TorchCUDAKernel,
    cudnn_missing,
)
from radixtrain.kernels.merge_attention import Route, routed_attention
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from radixtrain.testing import assert_within_reference_error
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan
from tests.kernels.cuda_stand_ins import HALF, Flash
from tests.kernels.ragged_calls import ragged
from tests.support import FULL
from tests.support.batches import (
    NAMES,
    assert_exact,
    attention_inputs,
    by_the_book,
    distances_of_plan,
    longer,
    one_softmax,
    plan_of,
    random_tensors,
    with_gradients,
)

pytestmark = FULL
aten = torch.ops.aten
STRATEGIES = ("cascade", "path", "expand")
TRIES = {
    "one prompt": [[1, 1, 1, *tail] for tail in ([2], [3, 2], [1, 1, 4, 4])],
    "nested": [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 3, 3], [2, 2, 1], [2, 2, 3, 3], [5]],
    "deep": [[1] * n + [2] for n in range(1, 7)],
    "two prompts of one shape": [[1, 1, 1, 2], [1, 1, 1, 3], [4, 4, 4, 2], [4, 4, 4, 3]],
    "equal and unshared": [[1, 2, 3], [2, 1, 4], [3, 4, 4]],
    "one sequence": [[1, 2, 3, 4]],
    "branches of one token": [[1, 2], [1, 3], [1, 4], [2, 2], [2, 3]],
    "one a prefix of another": [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [1, 2, 5]],
}
SCORINGS = [Scoring(0.4), Scoring(0.4, window=1), Scoring(0.4, window=3), Scoring(0.4, 0.7), Scoring(0.4, 0.7, 2)]


@pytest.fixture(scope="session")
def registered() -> Flash:
    """Once in a process, as torch demands: a worker may leave the tests of this file and come back."""
    return Flash()


@pytest.fixture
def rules(registered: Flash) -> Flash:
    registered.reset()
    return registered


INSIDE_TORCH = {"torch": TorchCUDAKernel, "cudnn": CudnnKernel, "efficient": EfficientKernel}
PACKAGED = {"flash_attn": FlashAttnKernel, "flash_attn_3": FlashAttn3Kernel, "flash_attn_4": FlashAttn4Kernel}
CLASSES = {**INSIDE_TORCH, **PACKAGED}


@pytest.fixture(params=CLASSES.values(), ids=CLASSES)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rules: Flash) -> VarlenKernel:
    for name, module in rules.packages().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.ops, "flash_attn_3", torch.ops.flash_attn_3_stand_in)
    return request.param()


def inputs(plan: PrefixPlan, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, as Hugging Face hands them over: (U, N, H) seen in (N, U, H) memory. No loss on padding."""
    tensors = attention_inputs(plan, dtype, heads, head_dim)
    return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]


class NothingIsReadBack(TorchDispatchMode):
    """Raises where a kernel's caller would wait for the device. What an operator does inside is not seen."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (aten._local_scalar_dense.default, aten.nonzero.default), function
        return function(*args, **(kwargs or {}))


def route_of(strategy: str, layout: TreeLayout, kernel: VarlenKernel, scoring: Scoring) -> Route:
    """A strategy with the pieces that it takes on CUDA."""
    if strategy == "cascade":
        return Route(layout.pieces, kernel, scoring)
    if strategy == "path":
        return Route((layout.paths,), kernel, scoring, layout.path_keys)
    return Route((layout.sequences,), kernel, scoring, layout.inverse_indices, layout.gather_indices)


def on_cuda(
    strategy: str, layout: TreeLayout, kernel: VarlenKernel, scoring: Scoring
) -> tuple[Callable[..., Tensor], list[Ragged]]:
    """Attention, and what it calls the kernel with."""
    route = route_of(strategy, layout, kernel, scoring)
    ragged = [piece.ragged for piece in route.pieces]
    return lambda q, k, v, *sinks: routed_attention(q, k, v, route, *sinks), ragged


def by_softmax(plan: PrefixPlan, scoring: Scoring) -> Callable[..., Tensor]:
    return partial(one_softmax, distances=distances_of_plan(plan), **asdict(scoring))


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_float64(kernel: VarlenKernel, rules: Flash, scoring: Scoring) -> None:
    """The merged out and log-sum-exp reach the backward, the window and the soft-cap both; no entry is empty."""
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    strategies = [name for name in STRATEGIES if name != "cascade" or scoring.window is None]
    for (name, sequences), strategy, groups in product(TRIES.items(), strategies, (1, 4)):
        plan = plan_of(sequences, pad_to_multiple_of=4 if groups == 1 else None)
        layout, tensors = TreeLayout.from_plan(plan), inputs(plan, (4, groups), 8, torch.float64)
        attention, calls = on_cuda(strategy, layout, kernel, scoring)
        assert all((call.cu_seqlens_q.diff() > 0).all() and (call.cu_seqlens_k.diff() > 0).all() for call in calls)
        if scoring.softcap and type(kernel) in INSIDE_TORCH.values():
            with pytest.raises(AssertionError, match="refuses a soft-cap on this kernel"):
                attention(*tensors[:3])
            continue
        for given in [(), (sinks,)][: 1 + (groups == 4)]:
            rules.reset()
            truth = with_gradients(by_softmax(plan, scoring), tensors, *given)
            assert_exact(with_gradients(attention, tensors, *given), truth, (name, strategy))
            assert rules.num_forward == rules.num_backward == len(calls)
            assert rules.seen == [scoring] * 2 * len(calls)


@pytest.mark.parametrize("dtype", HALF)
def test_16_bit(kernel: VarlenKernel, rules: Flash, dtype: torch.dtype) -> None:
    rules.dtypes = HALF
    for strategy in STRATEGIES:
        plan = plan_of(longer(TRIES["nested"], 8), min_shared_tokens=2)
        layout, tensors, scoring = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 16, dtype), Scoring(0.25)
        truth = with_gradients(by_softmax(plan, scoring), [x.double() for x in tensors])
        reference = by_the_book(tensors, distances_of_plan(plan), scoring.scale)
        actual = with_gradients(on_cuda(strategy, layout, kernel, scoring)[0], tensors)
        assert_within_reference_error(actual, reference, truth, names=NAMES)
    assert rules.num_backward >= 3


def test_strided_inputs_and_the_gradient_of_a_sum(kernel: VarlenKernel) -> None:
    """Every tensor that a kernel sees, gradients that it fills included, must be contiguous in its last axis."""
    plan = plan_of(TRIES["nested"])
    layout, tensors = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 8, torch.float64)
    for strategy in STRATEGIES:
        attention, _ = on_cuda(strategy, layout, kernel, Scoring(0.4))
        expected = with_gradients(attention, tensors)
        for which in range(4):
            views = list(tensors)
            views[which] = views[which].transpose(0, 2).contiguous().transpose(0, 2)
            assert_exact(with_gradients(attention, views), expected, which)
        ones = torch.ones_like(tensors[3])
        assert_exact(
            *(with_gradients(attention, [*tensors[:3], x]) for x in (ones, ones[0, 0, 0].expand_as(ones))), "a sum"
        )


@pytest.mark.parametrize(
    ("lengths", "causal", "shape"),  # shape: entries, queries and keys of each, as cuDNN sees them; None: not at all
    [
        ((9, 4), False, (1, 512, 4)),
        ((513, 4), False, (1, 1024, 4)),
        ((512, 4), False, (1, 512, 4)),
        ((6, 6), True, (1, 512, 512)),
        ((3, 6), True, None),
        ((9, 1), False, None),
        (((6, 6), (6, 6)), True, (2, 6, 6)),
        (((6, 5), (6, 5)), True, None),
        (((6, 6), (3, 3)), False, (2, 6, 3)),
    ],
)
def test_one_call(
    kernel: VarlenKernel, rules: Flash, lengths: tuple, causal: bool, shape: tuple[int, int, int] | None
) -> None:
    """In float64 as the specification, with an out in other memory and a log-sum-exp that are not those of this call.

    Queries that pad a call of cuDNN's add nothing to any key, and are cut off.
    """
    sides = [x if isinstance(x, tuple) else (x,) for x in lengths]
    call = ragged(*sides, causal), Scoring(0.4)
    q, k, v, dout = random_tensors((sum(sides[0]), sum(sides[1])))
    other = dout.flip(0).transpose(0, 1).contiguous().transpose(0, 1)
    found, expected = [], []
    for each, results in ((kernel, found), (EagerKernel(), expected)):
        out, lse = each.forward(q, k, v, *call)
        results += [out, lse, *each.backward(dout, q, k, v, other, lse + 0.7, *call)]
    assert_exact(found, expected)
    assert rules.dense == [shape] * (2 if shape and isinstance(kernel, CudnnKernel) else 0)


@pytest.mark.parametrize("head_dim", [8, 5])
def test_efficient_in_several_calls(monkeypatch: pytest.MonkeyPatch, rules: Flash, head_dim: int) -> None:
    """With room for one entry a call, and with a head dim that is filled up."""
    monkeypatch.setattr(efficient, "WORKSPACE", 1)
    plan = plan_of(TRIES["nested"])
    layout, tensors, scoring = TreeLayout.from_plan(plan), inputs(plan, (4, 2), head_dim, torch.float64), Scoring(0.4)
    truth = with_gradients(by_softmax(plan, scoring), tensors)
    for strategy in STRATEGIES:
        rules.reset()
        attention, calls = on_cuda(strategy, layout, EfficientKernel(), scoring)
        with NothingIsReadBack():
            actual = with_gradients(attention, tensors)
        assert_exact(actual, truth, strategy)
        assert rules.num_backward == sum(len(call.cu_seqlens_q) - 1 for call in calls)


@pytest.mark.parametrize("name", INSIDE_TORCH)
@pytest.mark.parametrize(("lengths", "causal"), [([[3, 40, 7], [5, 40, 9]], True), ([[50], [9]], False)])
def test_shapes_by_the_operators_of_this_torch(name: str, lengths: list[list[int]], causal: bool) -> None:
    """On meta tensors. The meta function of the memory-efficient backward does not take what its schema says."""
    num_queries, num_keys = (sum(side) for side in lengths)
    call = ragged(*lengths, causal, "meta"), Scoring(0.4)
    q, k, v = (
        torch.empty(heads, rows, 16, dtype=torch.bfloat16, device="meta").transpose(0, 1)
        for heads, rows in ((4, num_queries), (2, num_keys), (2, num_keys))
    )
    out, lse = INSIDE_TORCH[name]().forward(q, k, v, *call)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((4, num_queries), torch.float32)
    if name != "efficient":
        grads = INSIDE_TORCH[name]().backward(q, q, k, v, out, lse, *call)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


HOPPER = {
    "torch.cuda.is_available": True,
    "torch.cuda.get_device_capability": (9, 0),
    "torch.backends.cudnn.version": 91900,
}


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({}, None),
        ({"torch.cuda.get_device_capability": (10, 0)}, "needs a GPU of compute capability 9.x, this one has 10.0"),
        ({"torch.cuda.is_available": False}, "torch sees no CUDA device"),
        ({"torch.backends.cudnn.version": 91400}, "needs cuDNN 9.15 or newer, torch brings 91400"),
        ({"torch.are_deterministic_algorithms_enabled": True}, "adds up in no fixed order"),
        ({"os.getenv": "1"}, "lays out the log-sum-exp differently"),
    ],
)
def test_what_cudnn_lacks(monkeypatch: pytest.MonkeyPatch, lacks: dict, said: str | None) -> None:
    for name, value in {**HOPPER, **lacks}.items():
        monkeypatch.setattr(name, lambda *_, value=value: value)
    found = cudnn_missing(torch.device("cuda"))
    assert found is None if said is None else re.search(said, found), found
