"""The CUDA code path without CUDA: the classes that call the kernels, on the stand-ins of `cuda_stand_ins.py`."""

import sys
from collections.abc import Callable
from itertools import product
from types import ModuleType

import pytest
import torch
from cuda_stand_ins import HALF, Flash
from plans import longer, plan_of
from tiers import FULL
from torch import Tensor

from radixtrain.kernels import flash
from radixtrain.kernels.flash import FlashAttn3Kernel, FlashAttn4Kernel, FlashAttnKernel, TorchCUDAKernel
from radixtrain.kernels.merge_attention import attention_in_pieces, expand_attention, path_attention
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

pytestmark = FULL
STRATEGIES, NAMES = ("cascade", "path", "expand"), ("out", "dq", "dk", "dv")
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


@pytest.fixture(
    params=[TorchCUDAKernel, FlashAttnKernel, FlashAttn3Kernel, FlashAttn4Kernel],
    ids=["torch", "flash_attn", "flash_attn_3", "flash_attn_4"],
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rules: Flash) -> VarlenKernel:
    package, interface = ModuleType("flash_attn"), rules.package_2()
    package.flash_attn_interface = interface
    modules = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    modules |= {"flash_attn.cute": ModuleType("flash_attn.cute"), "flash_attn.cute.interface": rules.package_4()}
    modules |= {name: ModuleType(name) for name in ("flash_attn_3", "flash_attn_3._C")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.ops, "flash_attn_3", rules.ops_3)
    return request.param()


def inputs(plan: PrefixPlan, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, as Hugging Face hands them over: (U, N, H) seen in (N, U, H) memory. No loss on padding."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, plan.num_rows, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).transpose(0, 1) for s in shapes]
    tensors[3][plan.num_unique_tokens :] = 0
    return tensors


def with_gradients(attention: Callable[..., Tensor], plan: PrefixPlan, tensors: list[Tensor], *sinks: Tensor):
    """out of the unique tokens (that of padding means nothing), dq, dk, dv, and dsinks if there are sinks."""
    leaves = [x.detach().requires_grad_() for x in (*tensors[:3], *sinks)]
    out = attention(*leaves)
    return [out.detach()[: plan.num_unique_tokens], *torch.autograd.grad(out, leaves, tensors[3])]


def on_cuda(strategy: str, layout: TreeLayout, kernel: VarlenKernel, scoring: Scoring) -> Callable[..., Tensor]:
    """A strategy with the pieces that it takes on CUDA: for `cascade` one call a level."""
    if strategy == "cascade":
        pieces = tuple(layout.packed_pieces())
        return lambda q, k, v, *sinks: attention_in_pieces(q, k, v, pieces, kernel, scoring, *sinks)
    if strategy == "path":
        return lambda q, k, v, *sinks: path_attention(q, k, v, layout.path_keys, layout.paths, kernel, scoring, *sinks)
    copies = layout.inverse_indices, layout.gather_indices, layout.sequences
    return lambda q, k, v, *sinks: expand_attention(q, k, v, *copies, kernel, scoring, *sinks)


def by_reference(layout: TreeLayout, scoring: Scoring) -> Callable[..., Tensor]:
    mask = tree_mask(layout.row_subtree_ends, layout.row_depths, scoring.window)
    return lambda q, k, v, *sinks: reference_attention(q, k, v, mask, scoring, *sinks)


def calls_of(strategy: str, layout: TreeLayout) -> list[Ragged]:
    if strategy == "cascade":
        return [piece.ragged for piece in layout.packed_pieces()]
    return [layout.paths if strategy == "path" else layout.sequences]


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_float64(kernel: VarlenKernel, rules: Flash, scoring: Scoring) -> None:
    """The merged out and log-sum-exp reach the backward, the window and the soft-cap both; no entry is empty."""
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    strategies = [name for name in STRATEGIES if name != "cascade" or scoring.window is None]
    for (name, sequences), strategy, groups in product(TRIES.items(), strategies, (1, 4)):
        plan = plan_of(sequences, pad_to_multiple_of=4 if groups == 1 else None)
        layout, tensors = TreeLayout.from_plan(plan), inputs(plan, (4, groups), 8, torch.float64)
        attention, calls = on_cuda(strategy, layout, kernel, scoring), calls_of(strategy, layout)
        assert all((call.cu_seqlens_q.diff() > 0).all() and (call.cu_seqlens_k.diff() > 0).all() for call in calls)
        if scoring.softcap and isinstance(kernel, TorchCUDAKernel):
            with pytest.raises(AssertionError, match="refuses a soft-cap on this kernel"):
                attention(*tensors[:3])
            continue
        for given in [(), (sinks,)][: 1 + (groups == 4)]:
            rules.reset()
            truth = with_gradients(by_reference(layout, scoring), plan, tensors, *given)
            actual = with_gradients(attention, plan, tensors, *given)
            errors = [relative_error(x, y) for x, y in zip(actual, truth, strict=True)]
            if scoring.window == 1 and not given:  # of one key dq and dk are zero, but for the rounding of delta
                errors[1:3] = [float(x.abs().max()) for x in actual[1:3]]
            assert max(errors) <= 1e-12, (name, strategy, errors)
            assert rules.num_forward == rules.num_backward == len(calls)
            assert rules.seen == [scoring] * 2 * len(calls)


@pytest.mark.parametrize("dtype", HALF)
def test_16_bit(kernel: VarlenKernel, rules: Flash, dtype: torch.dtype) -> None:
    rules.dtypes = HALF
    for strategy in STRATEGIES:
        plan = plan_of(longer(TRIES["nested"], 8), min_shared_tokens=2)
        layout, tensors, scoring = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 16, dtype), Scoring(0.25)
        truth = with_gradients(by_reference(layout, scoring), plan, [x.double() for x in tensors])
        out, _, *grads = flash_attention_by_the_book(*tensors, tree_mask(layout.row_subtree_ends), scoring.scale)
        actual = with_gradients(on_cuda(strategy, layout, kernel, scoring), plan, tensors)
        assert_within_reference_error(actual, [out, *grads], truth, names=NAMES)
    assert rules.num_backward >= 3


def test_strided_inputs_and_the_gradient_of_a_sum(kernel: VarlenKernel) -> None:
    """Every tensor that a kernel sees, gradients that it fills included, must be contiguous in its last axis."""
    plan = plan_of(TRIES["nested"])
    layout, tensors = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 8, torch.float64)
    for strategy in STRATEGIES:
        attention = on_cuda(strategy, layout, kernel, Scoring(0.4))
        expected = with_gradients(attention, plan, tensors)
        for which in range(4):
            views = list(tensors)
            views[which] = views[which].transpose(0, 2).contiguous().transpose(0, 2)
            actual = with_gradients(attention, plan, views)
            assert max(relative_error(x, y) for x, y in zip(actual, expected, strict=True)) <= 1e-12
        ones = torch.ones_like(tensors[3])
        sums = [with_gradients(attention, plan, [*tensors[:3], x]) for x in (ones, ones[0, 0, 0].expand_as(ones))]
        assert max(relative_error(x, y) for x, y in zip(*sums, strict=True)) <= 1e-12


def test_this_torch_takes_a_window() -> None:
    assert flash.takes_window()
