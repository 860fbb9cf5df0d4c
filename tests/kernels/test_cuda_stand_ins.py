"""The CUDA code path without CUDA: the classes that call the kernels, on the stand-ins of `cuda_stand_ins.py`."""

import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_stand_ins import HALF, Cudnn, Flash
from tiers import FULL
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.kernels import flash
from radixtrain.kernels.cascade import cascade_attention
from radixtrain.kernels.cudnn import CudnnKernel, cudnn_max_head_dim, cudnn_missing, padded_length
from radixtrain.kernels.expand import expand_attention
from radixtrain.kernels.flash import FlashAttn3Kernel, FlashAttnKernel, TorchCUDAKernel, flash_3_missing
from radixtrain.kernels.looping import EagerKernel
from radixtrain.kernels.path import path_attention
from radixtrain.kernels.ragged import Ragged, VarlenKernel
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

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
def registered() -> dict[str, Any]:
    """Once in a process, as torch demands: a worker may leave the tests of this file and come back."""
    return {"flash": Flash(), "cudnn": Cudnn()}


@pytest.fixture
def rules(registered: dict[str, Any]) -> Flash:
    registered["flash"].reset()
    return registered["flash"]


@pytest.fixture
def operators(registered: dict[str, Any]) -> Cudnn:
    registered["cudnn"].reset()
    return registered["cudnn"]


class Others(EagerKernel):
    """Takes what cuDNN does not, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def forward(self, q, k, v, ragged, scoring):
        self.num_calls += 1
        return super().forward(q, k, v, ragged, scoring)


@pytest.fixture
def cudnn(operators: Cudnn) -> CudnnKernel:
    return CudnnKernel(Others(), least_keys=2)


@pytest.fixture(params=["torch", "flash_attn", "flash_attn_3", "cudnn"])
def kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rules: Flash, cudnn: CudnnKernel
) -> Iterator[VarlenKernel]:
    package, interface = ModuleType("flash_attn"), rules.package_2()
    package.flash_attn_interface = interface
    modules = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    modules |= {name: ModuleType(name) for name in ("flash_attn_3", "flash_attn_3._C")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.ops, "flash_attn_3", rules.ops_3)
    kernels = {"torch": TorchCUDAKernel, "flash_attn": FlashAttnKernel, "flash_attn_3": FlashAttn3Kernel}
    return cudnn if request.param == "cudnn" else kernels[request.param]()


def plan_of(sequences: list[list[int]], **options) -> PrefixPlan:
    return build_prefix_plan(np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]), **options)


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
        return lambda q, k, v, *sinks: cascade_attention(q, k, v, pieces, kernel, scoring, *sinks)
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


def is_for_cudnn(ragged: Ragged) -> bool:
    """Entries of one shape, of two keys or more, square if causal: by their lengths, which the kernel does not read."""
    shapes = set(zip(ragged.cu_seqlens_q.diff().tolist(), ragged.cu_seqlens_k.diff().tolist(), strict=True))
    return len(shapes) == 1 and all(keys > 1 and (queries == keys or not ragged.causal) for queries, keys in shapes)


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_float64(kernel: VarlenKernel, rules: Flash, operators: Cudnn, scoring: Scoring) -> None:
    """The merged out and log-sum-exp reach the backward, the window and the soft-cap both; no entry is empty."""
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    strategies = [name for name in STRATEGIES if name != "cascade" or scoring.window is None]
    for (name, sequences), strategy, groups in product(TRIES.items(), strategies, (1, 4)):
        plan = plan_of(sequences, pad_to_multiple_of=4 if groups == 1 else None)
        layout, tensors = TreeLayout.from_plan(plan), inputs(plan, (4, groups), 8, torch.float64)
        attention, calls = on_cuda(strategy, layout, kernel, scoring), calls_of(strategy, layout)
        assert all((call.cu_seqlens_q.diff() > 0).all() and (call.cu_seqlens_k.diff() > 0).all() for call in calls)
        if scoring.softcap and isinstance(kernel, TorchCUDAKernel | CudnnKernel):
            with pytest.raises(AssertionError, match="refuses a soft-cap on this kernel"):
                attention(*tensors[:3])
            continue
        for given in [(), (sinks,)][: 1 + (groups == 4)]:
            rules.reset()
            operators.reset()
            truth = with_gradients(by_reference(layout, scoring), plan, tensors, *given)
            actual = with_gradients(attention, plan, tensors, *given)
            errors = [relative_error(x, y) for x, y in zip(actual, truth, strict=True)]
            if scoring.window == 1 and not given:  # of one key dq and dk are zero, but for the rounding of delta
                errors[1:3] = [float(x.abs().max()) for x in actual[1:3]]
            assert max(errors) <= 1e-12, (name, strategy, errors)
            if not isinstance(kernel, CudnnKernel):
                assert rules.num_forward == rules.num_backward == len(calls)
                assert rules.seen == [scoring] * 2 * len(calls)
            else:
                expected = 0 if scoring.window else sum(map(is_for_cudnn, calls))
                assert operators.num_forward == operators.num_backward == expected


@pytest.mark.parametrize("dtype", HALF)
def test_16_bit(kernel: VarlenKernel, rules: Flash, operators: Cudnn, dtype: torch.dtype) -> None:
    rules.dtypes = operators.dtypes = HALF
    for_cudnn = {"cascade": "one prompt", "path": "one sequence", "expand": "two prompts of one shape"}
    for strategy in STRATEGIES:
        name = for_cudnn[strategy] if isinstance(kernel, CudnnKernel) else "nested"
        plan = plan_of([[t for t in sequence for _ in range(8)] for sequence in TRIES[name]], min_shared_tokens=2)
        layout, tensors, scoring = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 16, dtype), Scoring(0.25)
        truth = with_gradients(by_reference(layout, scoring), plan, [x.double() for x in tensors])
        out, _, *grads = flash_attention_by_the_book(*tensors, tree_mask(layout.row_subtree_ends), scoring.scale)
        actual = with_gradients(on_cuda(strategy, layout, kernel, scoring), plan, tensors)
        assert_within_reference_error(actual, [out, *grads], truth, names=NAMES)
    assert rules.num_backward + operators.num_backward >= 3


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


def test_wrong_calls_are_refused(rules: Flash, operators: Cudnn) -> None:
    """The stand-ins refuse what the real kernels refuse or misread."""
    kernel, scoring = TorchCUDAKernel(), Scoring(1.0)
    q, k, v, dout = inputs(plan_of([[1, 2, 3, 4]]), (2, 2), 8, torch.float64)
    four = torch.tensor([0, 4], dtype=torch.int32)
    out, lse = kernel.forward(q, k, v, Ragged(four, four, 4, 4, True), scoring)
    for bad in (
        Ragged(four.long(), four, 4, 4, True),
        Ragged(four, four + 1, 4, 4, True),
        Ragged(four, four, 3, 4, True),
    ):
        with pytest.raises(AssertionError):
            kernel.forward(q, k, v, bad, scoring)
        with pytest.raises(AssertionError):
            kernel.backward(dout, q, k, v, out, lse, bad, scoring)
    x, lse, seed = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 1), torch.zeros((), dtype=torch.int64)
    operators.dtypes = (torch.float32,)
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    rest = (seed, seed, None, None, None, 4, 4, 0.0, False)
    backward(x, x, x, x, x, lse, *rest, scale=1.0)
    other_order = x.transpose(1, 2).contiguous().transpose(1, 2)
    for given in ((x, x, x, x, x, lse[..., 0]), (other_order, x, x, x, x, lse), (x, x, x, x, other_order, lse)):
        with pytest.raises(AssertionError, match=r"misread before 9\.26|a plan for another memory order"):
            backward(*given, *rest, scale=1.0)


def ragged_of(queries: list[int], keys: list[int], causal: bool) -> Ragged:
    cu_seqlens = (torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32) for lengths in (queries, keys))
    return Ragged(*cu_seqlens, max(queries, default=0), max(keys, default=0), causal)


def random_call(ragged: Ragged, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, dout of that call, and the out and lse of a piece to merge with."""
    generator = torch.Generator().manual_seed(0)
    rows = int(ragged.cu_seqlens_q[-1]), int(ragged.cu_seqlens_k[-1])
    shapes = [(rows[0], 4, 8), (rows[1], 2, 8), (rows[1], 2, 8), (rows[0], 4, 8), (rows[0], 4, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def both_directions(kernel: Any, ragged: Ragged, scoring: Scoring, tensors: list[Tensor]) -> list[Tensor]:
    """out, lse, and the gradients with the out and the lse of a merge with a piece of as much weight."""
    q, k, v, dout, other = tensors
    out, lse = kernel.forward(q, k, v, ragged, scoring)
    return [out, lse, *kernel.backward(dout, q, k, v, (out + other) / 2, lse + 0.7, ragged, scoring)]


CALLS = {
    "one entry": ([5], [7], False),
    "one entry, causal": ([6], [6], True),
    "several entries": ([5, 5, 5], [3, 3, 3], False),
    "several entries, causal": ([4, 4], [4, 4], True),
    "single queries": ([1, 1, 1], [4, 4, 4], False),
    "padded to 128": ([70], [9], False),
    "not padded": ([64], [9], False),
}
NOT_FOR_CUDNN = {
    "bottom right": ([2], [4], True),
    "queries of several lengths": ([5, 4], [3, 3], False),
    "keys of several lengths": ([5, 5], [3, 4], False),
    "as many rows, but of several lengths": ([3, 5], [4, 4], False),
    "an entry without queries": ([0, 4], [4, 4], False),
    "an entry without keys": ([4, 4], [0, 4], False),
    "single keys": ([3], [1], False),
    "no rows": ([0], [0], True),
    "no queries": ([0], [4], False),
    "no entries": ([], [], False),
}


class TestCudnn:
    @pytest.mark.parametrize("name", [*CALLS, *NOT_FOR_CUDNN])
    def test_against_the_specification(self, cudnn: CudnnKernel, operators: Cudnn, name: str) -> None:
        """With a natural lse (N, T) as the protocol has it. On `meta` torch agrees on the shapes: no device is read."""
        ragged, scoring = ragged_of(*{**CALLS, **NOT_FOR_CUDNN}[name]), Scoring(0.4)
        tensors = random_call(ragged)
        actual, expected = (both_directions(each, ragged, scoring, tensors) for each in (cudnn, EagerKernel()))
        for mine, theirs in zip(actual, expected, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        assert operators.num_forward == operators.num_backward == (name in CALLS)
        if name in CALLS:
            bounds = ragged.cu_seqlens_q.to("meta"), ragged.cu_seqlens_k.to("meta")
            on_meta = Ragged(*bounds, ragged.max_seqlen_q, ragged.max_seqlen_k, ragged.causal)
            narrow = [x.to("meta", torch.bfloat16) for x in tensors]
            found = both_directions(CudnnKernel(SimpleNamespace(), least_keys=2), on_meta, scoring, narrow)
            assert [x.shape for x in found] == [x.shape for x in actual]
            assert found[1].dtype == torch.float32 and {x.dtype for x in (found[0], *found[2:])} == {torch.bfloat16}

    def test_one_memory_order_whatever_comes_in(self, cudnn: CudnnKernel, operators: Cudnn) -> None:
        """Or a plan that torch keeps for one order of out and dout would run on another."""
        ragged, scoring = ragged_of([64], [9], False), Scoring(0.4)
        tensors = random_call(ragged)
        q, k, v, dout, _ = tensors
        out, lse = cudnn.forward(q, k, v, ragged, scoring)
        expected = cudnn.backward(dout, q, k, v, out, lse, ragged, scoring)
        for which in range(6):
            given = [dout, q, k, v, out, lse]
            given[which] = given[which].transpose(0, -1).contiguous().transpose(0, -1)
            assert not given[which].is_contiguous()
            again = cudnn.forward(*given[1:4], ragged, scoring), cudnn.backward(*given, ragged, scoring)
            for mine, theirs in zip((*again[0], *again[1]), (out, lse, *expected), strict=True):
                assert relative_error(mine, theirs) <= 1e-12
        assert len(operators.plans) == 2, "one for each direction"

    def test_padded_lengths(self) -> None:
        """Little is added, and few lengths remain, so that batches of almost one size share a plan."""
        lengths = {1: 64, 64: 64, 65: 128, 1000: 1024, 1025: 1088, 2047: 2048, 2049: 2176}
        assert {length: padded_length(length) for length in lengths} == lengths
        long = range(1024, 65536)
        assert max(padded_length(n) / n for n in long) <= 1 + 1 / 16
        assert len({padded_length(n) for n in long}) == 6 * 16 + 1

    def test_batches_of_almost_one_size_share_a_plan(self, cudnn: CudnnKernel, operators: Cudnn) -> None:
        for length, causal in product((65, 90, 128), (False, True)):
            ragged = ragged_of([length], [length if causal else 9], causal)
            both_directions(cudnn, ragged, Scoring(0.4), random_call(ragged))
        assert len(operators.plans) == 4, "one for each direction, causal or not"

    def test_few_keys_are_not_worth_a_plan(self, operators: Cudnn) -> None:
        for keys, num_calls in ((255, 0), (256, 1)):
            ragged = ragged_of([3], [keys], False)
            CudnnKernel(others := Others()).forward(*random_call(ragged)[:3], ragged, Scoring(0.4))
            assert (operators.num_forward, others.num_calls) == (num_calls, 1 - num_calls)
        with pytest.raises(AssertionError, match="cuDNN takes no single key"):
            CudnnKernel(Others(), least_keys=1)

    def test_deterministic_algorithms(self, cudnn: CudnnKernel) -> None:
        ragged, scoring = ragged_of([6], [6], True), Scoring(0.4)
        torch.use_deterministic_algorithms(True, warn_only=True)
        cudnn.forward(*random_call(ragged)[:3], ragged, scoring)
        torch.use_deterministic_algorithms(True)
        said = r"kernel='cudnn' adds .* in no fixed order.*set the kernel to auto or torch"
        with pytest.raises(UserError, match=said):
            cudnn.forward(*random_call(ragged)[:3], ragged, scoring)


def test_kernels_by_name() -> None:
    kernel = varlen_kernel("cudnn", torch.device("cuda"))
    assert isinstance(kernel, CudnnKernel) and isinstance(kernel.others, TorchCUDAKernel)
    assert flash.takes_window()


@pytest.mark.parametrize(
    ("missing", "lacks", "said"),
    [
        (flash_3_missing, {}, None),
        (flash_3_missing, {"importlib.util.find_spec": None}, "the package flash-attn-3 is not installed"),
        (flash_3_missing, {"torch.cuda.get_device_capability": (10, 0)}, "needs a Hopper GPU .*, this one has 10.0"),
        (flash_3_missing, {"torch.cuda.is_available": False}, "torch sees no CUDA device"),
        (cudnn_missing, {}, None),
        (cudnn_missing, {"torch.cuda.get_device_capability": (8, 0)}, None),
        (cudnn_missing, {"torch.cuda.get_device_capability": (7, 5)}, "capability 8.0 or higher, this one has 7.5"),
        (cudnn_missing, {"torch.cuda.is_available": False}, "torch sees no CUDA device"),
        (cudnn_missing, {"torch.backends.cudnn.version": 90800}, "needs cuDNN 9.10 .*, torch loads version 90800"),
        (cudnn_missing, {"torch.backends.cudnn.version": None}, "comes without cuDNN"),
        (cudnn_missing, {"torch.version.cuda": None}, "comes without cuDNN"),  # ROCm has a version of MIOpen
    ],
)
def test_what_a_machine_lacks(monkeypatch: pytest.MonkeyPatch, missing, lacks: dict, said: str | None) -> None:
    hopper = {"importlib.util.find_spec": True, "torch.cuda.is_available": True, "torch.version.cuda": "13.0"}
    hopper |= {"torch.backends.cudnn.version": 91900, "torch.cuda.get_device_capability": (9, 0)}
    for name, value in {**hopper, **lacks}.items():
        monkeypatch.setattr(name, value if name == "torch.version.cuda" else lambda *_, value=value: value)
    found = missing(torch.device("cuda"))
    assert found is None if said is None else re.search(said, found), found
    wide = lacks.get("torch.cuda.get_device_capability", (9, 0)) == (9, 0)
    assert cudnn_max_head_dim(torch.device("cuda")) == (256 if wide else 128)
