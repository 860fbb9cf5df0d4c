"""The attention of cuDNN without CUDA: its class, driven by stand-ins for torch's two operators.

The stand-ins are registered with torch for CPU tensors, so every call is checked against the schema of the installed
torch. They check what the real operators check or take for granted, and compute by the book: masks from the top left,
log-sum-exp (b, N, T, 1), and gradients from the out and the log-sum-exp that they are given.
"""

import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from strategies_on_cuda import by_reference, inputs, on_cuda, plan_of, with_gradients
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.kernels.cudnn import CudnnKernel, cudnn_max_head_dim, cudnn_missing, padded_length
from radixtrain.kernels.flash import TorchCUDAKernel
from radixtrain.kernels.looping import EagerKernel
from radixtrain.kernels.ragged import Ragged
from radixtrain.kernels.reference import tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout

NAMES = ("out", "dq", "dk", "dv")
HALF = (torch.bfloat16, torch.float16)
TRIES = {
    "one prompt": [[1, 1, 1, *tail] for tail in ([2], [3, 2], [1, 1, 4, 4])],
    "nested": [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 3, 3], [2, 2, 1], [2, 2, 3, 3], [5]],
    "deep": [[1] * n + [2] for n in range(1, 7)],
    "two prompts of one shape": [[1, 1, 1, 2], [1, 1, 1, 3], [4, 4, 4, 2], [4, 4, 4, 3]],
    "equal and unshared": [[1, 2, 3], [2, 1, 4], [3, 4, 4]],
    "one sequence": [[1, 2, 3, 4]],
    "branches of one token": [[1, 2], [1, 3], [1, 4], [2, 2], [2, 3]],
}


class Operators:
    """`aten._scaled_dot_product_cudnn_attention` and its backward, with the cache of plans that torch keeps."""

    def __init__(self) -> None:
        self.dtypes: tuple[torch.dtype, ...] = ()
        self.plans: dict[tuple, tuple] = {}
        self.num_forward = self.num_backward = 0

    def reset(self) -> None:
        """Float64 is let in, to see the routing without rounding."""
        self.__init__()
        self.dtypes = (*HALF, torch.float64)

    def check(self, *tensors: Tensor) -> None:
        for x in tensors:
            assert x.ndim == 4 and x.numel(), f"got {tuple(x.shape)}"
            assert x.dtype == tensors[0].dtype and x.dtype in self.dtypes, f"got {x.dtype}"
            assert x.stride(-1) == 1, "the last axis has gaps"
            assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, f"head_dim {x.shape[-1]}"
            assert not any(step % 8 for step in (x.storage_offset(), *strides(x)[:-1])), "not at multiples of 16 bytes"

    def check_call(self, query, key, value, attn_bias, dropout_p, is_causal) -> None:
        self.check(query, key, value)
        assert attn_bias is None, "a bias is added"
        assert dropout_p == 0.0 and type(is_causal) is bool
        assert key.shape == value.shape and query.shape[::3] == key.shape[::3]
        assert query.shape[1] % key.shape[1] == 0
        assert key.shape[2] > 1, "cudnn SDPA does not support key/value sequence length 1."

    def plan(self, direction: str, inputs: tuple[Tensor, ...], is_causal: bool, rest: tuple[Tensor, ...]) -> None:
        """Kept by q, k and v. In torch 2.10 to 2.13 what a hit was made for is not compared with the rest."""
        key = (direction, is_causal, *((x.shape, strides(x)) for x in inputs))
        planned = tuple(strides(x) for x in rest)
        assert self.plans.setdefault(key, planned) == planned, "a plan for another memory order would run"

    def forward(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
        return_debug_mask=False, *, scale=None,
    ):  # fmt: skip
        self.num_forward += 1
        self.check_call(query, key, value, attn_bias, dropout_p, is_causal)
        assert compute_log_sumexp is True and return_debug_mask is False and type(scale) is float
        wide_q, wide_k, wide_v = wide(query, key, value)
        scores = top_left_scores(wide_q, wide_k, is_causal, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.empty_like(query).copy_(torch.exp(scores - lse) @ wide_v)
        self.plan("forward", (query, key, value), is_causal, (out, lse))
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse, None, None, query.shape[2], key.shape[2], seed, seed, None

    def backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        self.num_backward += 1
        self.check_call(query, key, value, attn_bias, dropout_p, is_causal)
        self.check(query, grad_out, out)
        assert grad_out.shape == out.shape == query.shape and type(scale) is float
        assert cum_seq_q is cum_seq_k is None and (max_q, max_k) == (query.shape[2], key.shape[2])
        assert logsumexp.shape == (*query.shape[:3], 1) and logsumexp.is_contiguous(), "others are misread before 9.26"
        assert logsumexp.dtype == torch.promote_types(query.dtype, torch.float32)
        assert philox_seed.dtype == philox_offset.dtype == torch.int64, "Blackwell converts them, used or not"
        self.plan("backward", (query, key, value), is_causal, (grad_out, out, logsumexp))
        wide_q, wide_k, wide_v = wide(query, key, value)
        wide_dout, wide_out = grad_out.to(wide_q.dtype), out.to(wide_q.dtype)
        p = torch.exp(top_left_scores(wide_q, wide_k, is_causal, scale) - logsumexp)
        delta = (wide_dout * wide_out).sum(-1, keepdim=True)
        ds = p * (wide_dout @ wide_v.mT - delta) * scale
        grads = ds @ wide_k, ds.mT @ wide_q, p.mT @ wide_dout
        shapes = (query, key, value)
        return tuple(
            torch.empty_like(x).copy_(grad.unflatten(1, (x.shape[1], -1)).sum(2))
            for x, grad in zip(shapes, grads, strict=True)
        )


def strides(x: Tensor) -> tuple[int, ...]:
    """Those that are used: an axis of length 1 may have any."""
    return tuple(step if length > 1 else 0 for step, length in zip(x.stride(), x.shape, strict=True))


def wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float32 or float64, with a key/value head for every query head."""
    groups = query.shape[1] // key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.to(dtype), *(x.to(dtype).repeat_interleave(groups, 1) for x in (key, value))


def top_left_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf) if causal else scores


@pytest.fixture(scope="module")
def registered() -> Iterator[Operators]:
    operators, library = Operators(), torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", operators.forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", operators.backward, "CPU")
    yield operators
    library._destroy()


@pytest.fixture
def operators(registered: Operators) -> Operators:
    registered.reset()
    return registered


class Others(EagerKernel):
    """The second kernel, which keeps the calls that it got."""

    def __init__(self) -> None:
        self.calls: list[Ragged] = []

    def forward(self, q, k, v, ragged, scoring):
        self.calls.append(ragged)
        return super().forward(q, k, v, ragged, scoring)

    def backward(self, dout, q, k, v, out, lse, ragged, scoring):
        self.calls.append(ragged)
        return super().backward(dout, q, k, v, out, lse, ragged, scoring)


@pytest.fixture
def kernel(operators: Operators) -> CudnnKernel:
    return CudnnKernel(Others(), least_keys=2)


def calls_of(strategy: str, layout: TreeLayout) -> list[Ragged]:
    """On CUDA, where `cascade` has one call a level."""
    if strategy == "cascade":
        return [piece.ragged for piece in layout.packed_pieces()]
    return [layout.paths if strategy == "path" else layout.sequences]


def is_for_cudnn(ragged: Ragged) -> bool:
    """Entries of one shape, of two keys or more, square if causal: by their lengths, which the kernel does not read."""
    shapes = set(zip(ragged.cu_seqlens_q.diff().tolist(), ragged.cu_seqlens_k.diff().tolist(), strict=True))
    return len(shapes) == 1 and all(keys > 1 and (queries == keys or not ragged.causal) for queries, keys in shapes)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_stand_in_has_the_signature_of_the_installed_torch(name: str) -> None:
    ours = inspect.signature(getattr(Operators(), name)).parameters.values()
    suffix = "_backward" if name == "backward" else ""
    theirs = getattr(torch.ops.aten, f"_scaled_dot_product_cudnn_attention{suffix}").default._schema.arguments
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in ours] == [(a.name, a.kwarg_only) for a in theirs]


@pytest.mark.parametrize("trie", TRIES)
@pytest.mark.parametrize("strategy", ["cascade", "path", "expand"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("padding", [None, 4])
def test_float64(
    kernel: CudnnKernel, operators: Operators, trie: str, strategy: str, heads: tuple[int, int], padding: int | None
) -> None:
    plan = plan_of(TRIES[trie], pad_to_multiple_of=padding)
    layout = TreeLayout.from_plan(plan)
    tensors, scoring = inputs(plan, heads, 8, torch.float64), Scoring(0.4)
    truth = with_gradients(by_reference(layout, scoring), plan, *tensors)
    actual = with_gradients(on_cuda(strategy, layout, kernel, scoring), plan, *tensors)
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, actual, truth, strict=True)}
    assert max(errors.values()) <= 1e-12, errors
    calls = calls_of(strategy, layout)
    num_for_cudnn = sum(map(is_for_cudnn, calls))
    assert operators.num_forward == operators.num_backward == num_for_cudnn
    assert len(kernel.others.calls) == 2 * (len(calls) - num_for_cudnn)


def test_the_tries_reach_both_kernels_in_every_strategy() -> None:
    for strategy in ("cascade", "path", "expand"):
        found = {
            is_for_cudnn(call)
            for trie in TRIES.values()
            for call in calls_of(strategy, TreeLayout.from_plan(plan_of(trie)))
        }
        assert found == {True, False}, strategy
    nested = TreeLayout.from_plan(plan_of(TRIES["one prompt"]))
    assert [is_for_cudnn(call) for call in calls_of("cascade", nested)] == [False, True]


@pytest.mark.parametrize("strategy", ["cascade", "path", "expand"])
@pytest.mark.parametrize("dtype", HALF)
def test_16_bit(kernel: CudnnKernel, operators: Operators, strategy: str, dtype: torch.dtype) -> None:
    operators.dtypes = HALF
    tries = {"cascade": "one prompt", "path": "one sequence", "expand": "two prompts of one shape"}
    sequences = [[token for token in sequence for _ in range(8)] for sequence in TRIES[tries[strategy]]]
    plan = plan_of(sequences, min_shared_tokens=2)
    layout = TreeLayout.from_plan(plan)
    tensors, scale = inputs(plan, (4, 2), 16, dtype), 0.25
    truth = with_gradients(by_reference(layout, Scoring(scale)), plan, *(x.double() for x in tensors))
    out, _, *grads = flash_attention_by_the_book(*tensors, tree_mask(layout.row_subtree_ends), scale)
    actual = with_gradients(on_cuda(strategy, layout, kernel, Scoring(scale)), plan, *tensors)
    assert_within_reference_error(actual, [out, *grads], truth, names=NAMES)
    assert operators.num_forward == operators.num_backward == 1


def test_sinks(kernel: CudnnKernel, operators: Operators) -> None:
    plan = plan_of(TRIES["one prompt"])
    layout, tensors, scoring = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 8, torch.float64), Scoring(0.4)
    results = []
    for attention_of in (by_reference, lambda *given: on_cuda("cascade", given[0], kernel, *given[1:])):
        sinks = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True)
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = attention_of(layout, scoring, sinks)(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, [*leaves, sinks], tensors[3])])
    assert max(relative_error(x, y) for y, x in zip(*results, strict=True)) <= 1e-12
    assert operators.num_forward == 1


def ragged_of(queries: list[int], keys: list[int], causal: bool) -> Ragged:
    cu_seqlens = (torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32) for lengths in (queries, keys))
    return Ragged(*cu_seqlens, max(queries, default=0), max(keys, default=0), causal)


def random_call(ragged: Ragged, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, dout of that call."""
    generator = torch.Generator().manual_seed(0)
    rows = int(ragged.cu_seqlens_q[-1]), int(ragged.cu_seqlens_k[-1])
    shapes = [(rows[0], heads[0], 8), (rows[1], heads[1], 8), (rows[1], heads[1], 8), (rows[0], heads[0], 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


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


def both_directions(kernel, ragged: Ragged, scoring: Scoring, tensors: list[Tensor]) -> list[Tensor]:
    """out, lse, and the gradients with the out and the lse of a merge with a piece of as much weight."""
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v, ragged, scoring)
    other = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, lse, *kernel.backward(dout, q, k, v, (out + other) / 2, lse + 0.7, ragged, scoring)]


@pytest.mark.parametrize("name", [*CALLS, *NOT_FOR_CUDNN])
def test_against_the_specification(kernel: CudnnKernel, operators: Operators, name: str) -> None:
    """With lse (N, T) as the protocol has it, and gradients of a merged out and lse."""
    ragged, scoring = ragged_of(*{**CALLS, **NOT_FOR_CUDNN}[name]), Scoring(0.4)
    tensors = random_call(ragged)
    actual, expected = (both_directions(each, ragged, scoring, tensors) for each in (kernel, EagerKernel()))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13)
    assert operators.num_forward == operators.num_backward == (name in CALLS)


def test_log_sum_exp_is_natural_and_by_head(kernel: CudnnKernel) -> None:
    ragged = ragged_of([2, 2], [3, 3], False)
    q, k, v, _ = random_call(ragged, heads=(2, 2), dtype=torch.bfloat16)
    _, lse = kernel.forward(q, k, v, ragged, Scoring(0.5))
    expected = [
        [torch.logsumexp(0.5 * k[t // 2 * 3 :, n][:3].float() @ q[t, n].float(), 0) for t in range(4)] for n in range(2)
    ]
    assert lse.dtype == torch.float32 and torch.allclose(lse, torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "out", "lse"])
def test_one_memory_order_whatever_comes_in(kernel: CudnnKernel, operators: Operators, which: str) -> None:
    """Or a plan that torch keeps for one order of out and dout would run on another."""
    ragged, scoring = ragged_of([64], [9], False), Scoring(0.4)
    q, k, v, dout = random_call(ragged)
    out, lse = kernel.forward(q, k, v, ragged, scoring)
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    expected = kernel.backward(*tensors.values(), ragged, scoring)
    tensors[which] = tensors[which].transpose(0, -1).contiguous().transpose(0, -1)
    assert not tensors[which].is_contiguous()
    again = kernel.forward(tensors["q"], tensors["k"], tensors["v"], ragged, scoring)
    actual = kernel.backward(*tensors.values(), ragged, scoring)
    for mine, theirs in zip((*actual, *again), (*expected, out, lse), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13)
    assert len(operators.plans) == 2, "one for each direction"


def test_gradient_of_a_sum(kernel: CudnnKernel) -> None:
    """Its dout has strides of zero."""
    ragged, scoring = ragged_of([64], [9], False), Scoring(0.4)
    q, k, v, _ = random_call(ragged)
    out, lse = kernel.forward(q, k, v, ragged, scoring)
    ones = torch.ones_like(out)
    expanded = kernel.backward(ones[0, 0, 0].expand_as(out), q, k, v, out, lse, ragged, scoring)
    expected = kernel.backward(ones, q, k, v, out, lse, ragged, scoring)
    assert all(torch.equal(x, y) for x, y in zip(expanded, expected, strict=True))


class TestPadding:
    @pytest.mark.parametrize(
        ("length", "padded"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1025, 1088), (2047, 2048), (2049, 2176)]
    )
    def test_lengths(self, length: int, padded: int) -> None:
        assert padded_length(length) == padded

    def test_little_is_added_and_few_lengths_remain(self) -> None:
        lengths = range(1024, 65536)
        assert max(padded_length(n) / n for n in lengths) <= 1 + 1 / 16
        assert len({padded_length(n) for n in lengths}) == 6 * 16 + 1

    @pytest.mark.parametrize("causal", [False, True])
    def test_batches_of_almost_one_size_share_a_plan(self, kernel, operators, causal: bool) -> None:
        for length in (65, 90, 128):
            ragged = ragged_of([length], [length if causal else 9], causal)
            both_directions(kernel, ragged, Scoring(0.4), random_call(ragged))
        assert len(operators.plans) == 2, "one for each direction"


def test_few_keys_are_not_worth_a_plan(operators: Operators) -> None:
    kernel = CudnnKernel(Others())
    for keys, num_calls in ((255, 0), (256, 1)):
        ragged = ragged_of([3], [keys], False)
        kernel.forward(*random_call(ragged)[:3], ragged, Scoring(0.4))
        assert operators.num_forward == num_calls
    with pytest.raises(AssertionError, match="cuDNN takes no single key"):
        CudnnKernel(Others(), least_keys=1)


def test_a_window_goes_to_the_second_kernel(kernel: CudnnKernel, operators: Operators) -> None:
    ragged, scoring = ragged_of([6], [6], True), Scoring(0.4, window=2)
    tensors = random_call(ragged)
    actual, expected = (both_directions(each, ragged, scoring, tensors) for each in (kernel, EagerKernel()))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert operators.num_forward == operators.num_backward == 0


def test_a_soft_cap_is_not_lost(kernel: CudnnKernel) -> None:
    ragged = ragged_of([6], [6], True)
    with pytest.raises(AssertionError, match="refuses a soft-cap on this kernel"):
        kernel.forward(*random_call(ragged)[:3], ragged, Scoring(0.4, softcap=1.0))


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_from_a_device_and_torch_agrees_on_the_shapes(name: str) -> None:
    """On `meta` tensors, by torch's own description of what its operators return."""
    ragged, scoring = ragged_of(*CALLS[name]), Scoring(0.4)
    shapes = [x.shape for x in both_directions(EagerKernel(), ragged, scoring, random_call(ragged))]
    q, k, v, dout = (x.to("meta", torch.bfloat16) for x in random_call(ragged))
    bounds = ragged.cu_seqlens_q.to("meta"), ragged.cu_seqlens_k.to("meta")
    on_meta = Ragged(*bounds, ragged.max_seqlen_q, ragged.max_seqlen_k, ragged.causal)
    kernel = CudnnKernel(SimpleNamespace(), least_keys=2)
    out, lse = kernel.forward(q, k, v, on_meta, scoring)
    grads = kernel.backward(dout, q, k, v, out, lse, on_meta, scoring)
    assert [x.shape for x in (out, lse, *grads)] == shapes
    assert lse.dtype == torch.float32 and {x.dtype for x in (out, *grads)} == {torch.bfloat16}


def test_deterministic_algorithms(kernel: CudnnKernel) -> None:
    ragged, scoring = ragged_of([6], [6], True), Scoring(0.4)
    tensors = random_call(ragged)[:3]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        kernel.forward(*tensors, ragged, scoring)
        torch.use_deterministic_algorithms(True)
        with pytest.raises(
            UserError, match=r"kernel='cudnn' adds .* in no fixed order.*set the kernel to auto or torch"
        ):
            kernel.forward(*tensors, ragged, scoring)
    finally:
        torch.use_deterministic_algorithms(False)


class TestWhatTheMachineLacks:
    CUDA = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.version.cuda", "13.0")
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))

    def test_nothing(self) -> None:
        assert cudnn_missing(self.CUDA) is None
        assert cudnn_max_head_dim(self.CUDA) == 256

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
    def test_another_gpu_takes_narrower_heads(self, monkeypatch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        assert cudnn_missing(self.CUDA) is None
        assert cudnn_max_head_dim(self.CUDA) == 128

    def test_an_older_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
        assert cudnn_missing(self.CUDA) == "needs a GPU of compute capability 8.0 or higher, this one has 7.5"

    def test_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert "torch sees no CUDA device" in cudnn_missing(self.CUDA)

    @pytest.mark.parametrize("version", [90800, 8907])
    def test_an_older_library(self, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: version)
        expected = f"needs cuDNN 9.10 or newer (version 91000), torch loads version {version}"
        assert cudnn_missing(self.CUDA) == expected

    def test_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without it; and on ROCm, where torch reports the version of MIOpen."""
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: None)
        assert "comes without cuDNN" in cudnn_missing(self.CUDA)
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: 3005001)
        monkeypatch.setattr("torch.version.cuda", None)
        assert "comes without cuDNN" in cudnn_missing(self.CUDA)


def test_by_name() -> None:
    kernel = varlen_kernel("cudnn", torch.device("cuda"))
    assert isinstance(kernel, CudnnKernel) and isinstance(kernel.others, TorchCUDAKernel)


def test_rules_are_enforced(operators: Operators) -> None:
    """The stand-ins refuse what the real operators refuse or misread."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    x = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    good = {"q": x, "k": x, "v": x, "bias": None, "lse": True, "dropout": 0.0, "causal": False, "debug": False}
    op(*good.values(), scale=1.0)
    for changed, why in (
        (dict.fromkeys("qkv", x.float()), "got torch.float32"),
        ({"q": x[0]}, r"got \(2, 4, 8\)"),
        ({"q": x.mT.contiguous().mT}, "the last axis has gaps"),
        (dict.fromkeys("kv", x[:, :, :1]), "key/value sequence length 1"),
        (dict.fromkeys("qkv", torch.zeros(1, 2, 4, 12, dtype=torch.bfloat16)), "head_dim 12"),
        ({"k": torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)[..., 4:12]}, "multiples of 16 bytes"),
        ({"bias": x}, "a bias is added"),
        ({"dropout": 0.1}, r"0\.1 == 0\.0"),
        ({"lse": False}, "False is True"),
    ):
        with pytest.raises(AssertionError, match=why):
            op(*{**good, **changed}.values(), scale=1.0)
    lse, seed = torch.zeros(1, 2, 4, 1), torch.zeros((), dtype=torch.int64)
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    rest = (seed, seed, None, None, None, 4, 4, 0.0, False)
    backward(x, x, x, x, x, lse, *rest, scale=1.0)
    other_order = x.transpose(1, 2).contiguous().transpose(1, 2)
    for given, why in (
        ((x, x, x, x, x, lse.transpose(1, 2).contiguous().transpose(1, 2), *rest), r"misread before 9\.26"),
        ((x, x, x, x, x, lse[..., 0], *rest), r"misread before 9\.26"),
        ((x, x, x, x, x, lse, None, *rest[1:]), "dtype"),
        ((other_order, x, x, x, x, lse, *rest), "a plan for another memory order"),
        ((x, x, x, x, other_order, lse, *rest), "a plan for another memory order"),
    ):
        with pytest.raises((AssertionError, AttributeError), match=why):
            backward(*given, scale=1.0)
