"""T query tokens, J key tokens, N query heads, K key/value heads, H head dim."""

from collections.abc import Callable, Iterator
from itertools import accumulate, product

import pytest
import torch
from torch import Tensor

from radixtrain.kernels import cpu_loops
from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel, schedule_of
from radixtrain.kernels.cudnn import CudnnKernel
from radixtrain.kernels.efficient import EfficientKernel
from radixtrain.kernels.flash import TorchCUDAKernel
from radixtrain.kernels.varlen import KERNELS, varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from radixtrain.testing import relative_error

CPU = torch.device("cpu")
NAMES = ("out", "lse", "dq", "dk", "dv")

# lengths of the queries, lengths of the keys, causal
CASES = {
    "causal, onto themselves": ((5, 1, 7), (5, 1, 7), True),
    "causal, fewer queries than keys": ((2, 1, 3), (5, 4, 3), True),
    "causal, one entry": ((6,), (6,), True),
    "causal, one entry, fewer queries": ((3,), (9,), True),
    "everything": ((4, 2), (3, 6), False),
    "everything, one entry": ((4,), (5,), False),
    "causal, some empty": ((2, 0, 3, 1, 0), (0, 4, 5, 1, 0), True),
    "everything, some empty": ((2, 0, 3, 1, 0), (0, 4, 5, 2, 0), False),
}

kernels = pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])
Case = tuple[tuple[int, ...], tuple[int, ...], bool]


def cu_seqlens(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def ragged_call(case: Case, with_bounds: bool = True) -> Ragged:
    lengths_q, lengths_k, causal = case
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    q, k = cu_q.tolist(), cu_k.tolist()
    bounds = tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)) if with_bounds else None
    return Ragged(cu_q, cu_k, max(lengths_q, default=0), max(lengths_k, default=0), causal, bounds)


def inputs(case: Case, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = sum(case[0]), sum(case[1])
    shapes = (num_queries, heads[0]), (num_keys, heads[1]), (num_keys, heads[1]), (num_queries, heads[0])
    return [torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masked_entries(case: Case, window: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys and mask of each entry: causal means that query t sees the keys up to t + J - T.

    A window leaves it the last `window` of those.
    """
    lengths_q, lengths_k, causal = case
    ends = zip(accumulate(lengths_q), accumulate(lengths_k), strict=True)
    for (end_q, end_k), num_q, num_k in zip(ends, lengths_q, lengths_k, strict=True):
        last_key = torch.arange(num_q) + num_k - num_q if causal else torch.full((num_q,), num_k)
        seen = torch.arange(num_k) <= last_key[:, None]
        if window is not None:
            seen &= torch.arange(num_k) > last_key[:, None] - window
        yield slice(end_q - num_q, end_q), slice(end_k - num_k, end_k), seen


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, case: Case, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """One softmax an entry, written as Hugging Face's eager functions write it: out and lse."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    outs, lses = [], []
    for queries, keys, mask in masked_entries(case, scoring.window):
        scores = torch.einsum("tnh,jnh->ntj", q[queries], k[keys]) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        outs.append(torch.einsum("ntj,jnh->tnh", scores.softmax(-1), v[keys]))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def by_softmax(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, case: Case, scoring: Scoring) -> list[Tensor]:
    """out, lse, dq, dk, dv by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = softmax_attention(*leaves, case, scoring)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, dout))]


def by_kernel(
    kernel: VarlenKernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, ragged: Ragged, scoring: Scoring
) -> list[Tensor]:
    out, lse = kernel.forward(q, k, v, ragged, scoring)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, ragged, scoring)]


def assert_equal_in_float64(actual: list[Tensor], truth: list[Tensor], what: object = "") -> None:
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, actual, truth, strict=True)}
    assert max(errors.values()) <= 1e-12, (what, errors)


def split_lse(results: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The results with the finite part of the log-sum-exp, and a mask of that part."""
    finite = results[1].isfinite()
    assert (results[1][~finite] == float("-inf")).all()
    return [results[0], results[1][finite], *results[2:]], finite


HEADS = [((2, 2), 8), ((4, 2), 17), ((4, 1), 64), ((4, 2), 64), ((4, 1), 8)]  # and their width


@kernels
def test_float64(kernel: VarlenKernel) -> None:
    for (name, case), (heads, head_dim) in product(CASES.items(), HEADS):
        tensors, scoring = inputs(case, heads, head_dim, torch.float64), Scoring(1.3 * head_dim**-0.5)
        truth, finite = split_lse(by_softmax(*tensors, case, scoring))
        actual, here = split_lse(by_kernel(kernel, *tensors, ragged_call(case), scoring))
        assert torch.equal(here, finite)
        assert_equal_in_float64(actual, truth, name)


MODIFIERS = {
    "window of 2": Scoring(0.4, window=2),
    "window of 3": Scoring(0.4, window=3),
    "window of all": Scoring(0.4, window=9),
    "soft-cap": Scoring(0.4, softcap=0.7),
    "soft-cap and window": Scoring(0.4, softcap=0.7, window=3),
}
LONG = (300, 1, 40), (1500, 700, 40), True  # several runs of queries, and whole blocks of a kernel that nobody sees
CAUSAL = {name: case for name, case in CASES.items() if case[2] and "empty" not in name}
CAUSAL_OR_NOT = [case for name, case in CASES.items() if "empty" not in name]
modified = pytest.mark.parametrize(
    ("kernel", "scoring"),
    [
        pytest.param(kernel, scoring, id=f"{type(kernel).__name__}-{name}")
        for kernel in (EagerKernel(), TorchCPUKernel())
        for name, scoring in MODIFIERS.items()
        if scoring.softcap is None or isinstance(kernel, EagerKernel)
    ],
)


class TestModifiers:
    @modified
    def test_float64(self, kernel: VarlenKernel, scoring: Scoring) -> None:
        for case, heads in product([*CAUSAL.values(), LONG], [(2, 2), (4, 1)]):
            tensors = inputs(case, heads, 8, torch.float64)
            truth = by_softmax(*tensors, case, scoring)
            assert_equal_in_float64(by_kernel(kernel, *tensors, ragged_call(case), scoring), truth, case)

    def test_eager_queries_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No more scores at once than are allowed, causal entries in one piece included, and equal gradients."""
        written = []

        class Watched(Scoring):
            def of(self, products: Tensor) -> Tensor:
                written.append(products.numel())
                return super().of(products)

        monkeypatch.setattr(cpu_loops, "MOST_SCORES", 40)
        monkeypatch.setattr(cpu_loops, "LONG", 6)
        for scoring, case in product([Watched(0.4), Watched(0.4, 0.7), Watched(0.4, window=3)], CAUSAL_OR_NOT):
            if scoring.window is not None and not case[2]:
                continue
            tensors = inputs(case, (4, 2), 8, torch.float64)
            actual = by_kernel(EagerKernel(), *tensors, ragged_call(case), scoring)
            assert_equal_in_float64(actual, by_softmax(*tensors, case, scoring), case)
        assert max(written) <= 40

    def test_entries_that_are_empty(self) -> None:
        case = CASES["causal, some empty"]
        tensors = inputs(case, (2, 1), 8, torch.float64)
        for kernel, scoring in ((EagerKernel(), Scoring(0.4, 0.7, 3)), (TorchCPUKernel(), Scoring(0.4, window=3))):
            out, lse, *grads = by_kernel(kernel, *tensors, ragged_call(case), scoring)
            assert all(x.isfinite().all() for x in (out, *grads))
            assert not out[:2].any() and (lse[:, :2] == float("-inf")).all()
            assert not grads[1][:4].any() and not grads[2][:4].any()

    @kernels
    def test_window_needs_causality(self, kernel: VarlenKernel) -> None:
        case = CASES["everything"]
        with pytest.raises(AssertionError, match="counts from the last key"):
            kernel.forward(*inputs(case, (2, 2), 8, torch.float64)[:3], ragged_call(case), Scoring(1.0, window=2))

    def test_pairs_grow_with_the_length_alone(self) -> None:
        """Within a window of 64, twice the tokens are twice the pairs, not four times."""
        pairs = []
        for length in (1024, 2048):
            parts = schedule_of(ragged_call(((length,), (length,), True)), window=64).parts
            pairs.append(sum(part.number * part.num_queries * part.num_keys for part in parts))
        assert pairs[1] < 2.1 * pairs[0]


@kernels
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 0), (0, 3), (3, 0)])
def test_nothing_to_attend(kernel: VarlenKernel, num_queries: int, num_keys: int) -> None:
    for lengths in (((num_queries,), (num_keys,)), ((num_queries, 0), (0, num_keys))):
        case = *lengths, True
        q, k, v, dout = inputs(case, (2, 1), 8, torch.float32)
        out, lse, *grads = by_kernel(kernel, q, k, v, dout, ragged_call(case), Scoring(1.0))
        assert lse.shape == (2, num_queries)
        assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
        assert not any(x.any() for x in (out, *grads))


@kernels
def test_bounds_on_the_host_or_not(kernel: VarlenKernel) -> None:
    for name, case in CASES.items():
        tensors = inputs(case, (4, 2), 8, torch.float64)
        with_bounds, without = (
            split_lse(by_kernel(kernel, *tensors, ragged_call(case, host), Scoring(0.5))) for host in (True, False)
        )
        assert torch.equal(with_bounds[1], without[1])
        assert_equal_in_float64(with_bounds[0], without[0], name)


def heads_first(x: Tensor) -> Tensor:
    """As Hugging Face hands them over: (T, N, H) seen in (N, T, H) memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def slice_of_larger(x: Tensor) -> Tensor:
    larger = x.new_full((x.shape[0] + 2, x.shape[1] + 3, x.shape[2] + 5), float("nan"))
    larger[1:-1, 2:-1, 4:-1] = x
    return larger[1:-1, 2:-1, 4:-1]


def last_axis_strided(x: Tensor) -> Tensor:
    return x.transpose(0, 2).contiguous().transpose(0, 2)


STRIDED_CASES = [CASES[name] for name in ("causal, onto themselves", "causal, one entry", "everything")]


@kernels
@pytest.mark.parametrize("strided", [heads_first, slice_of_larger, last_axis_strided])
def test_strided_inputs(kernel: VarlenKernel, strided: Callable[[Tensor], Tensor]) -> None:
    for case in STRIDED_CASES:
        tensors, ragged = inputs(case, (4, 2), 8, torch.float64), ragged_call(case)
        expected = by_kernel(kernel, *tensors, ragged, Scoring(0.5))
        for which in ("q", "k", "v", "dout", "all"):
            named = zip(("q", "k", "v", "dout"), tensors, strict=True)
            views = [strided(x) if which in (name, "all") else x for name, x in named]
            assert_equal_in_float64(by_kernel(kernel, *views, ragged, Scoring(0.5)), expected, which)


@kernels
def test_gradient_of_a_sum(kernel: VarlenKernel) -> None:
    """`out.sum().backward()` hands over an expanded gradient, all strides 0."""
    for case in STRIDED_CASES:
        q, k, v, dout = inputs(case, (4, 2), 8, torch.float64)
        ones = torch.ones((), dtype=torch.float64).expand_as(dout)
        expanded, written_out = (
            by_kernel(kernel, q, k, v, x, ragged_call(case), Scoring(0.5)) for x in (ones, ones.contiguous())
        )
        assert_equal_in_float64(expanded, written_out)


@kernels
def test_inputs_are_left_alone(kernel: VarlenKernel) -> None:
    case = CASES["causal, onto themselves"]
    for dtype in (torch.float64, torch.bfloat16):
        tensors, ragged = inputs(case, (4, 2), 8, dtype), ragged_call(case)
        given = [*tensors, *kernel.forward(*tensors[:3], ragged, Scoring(0.5))]
        before = [x.clone() for x in given]
        kernel.backward(tensors[3], *tensors[:3], *given[4:], ragged, Scoring(0.5))
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@kernels
def test_scratch_memory_inside_torch_is_not_read(kernel: VarlenKernel) -> None:
    """`fill_uninitialized_memory` poisons what the C++ kernels allocate, which a patch in Python cannot reach."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for name, case in CASES.items():
            tensors, scoring = inputs(case, (4, 2), 8, torch.float64), Scoring(0.5)
            actual, _ = split_lse(by_kernel(kernel, *tensors, ragged_call(case), scoring))
            assert_equal_in_float64(actual, split_lse(by_softmax(*tensors, case, scoring))[0], name)
    finally:
        torch.use_deterministic_algorithms(False)


def test_kernel_by_name() -> None:
    assert isinstance(varlen_kernel("eager", torch.device("cuda")), EagerKernel)
    assert isinstance(varlen_kernel("torch", CPU), TorchCPUKernel)
    for name, kind in (("torch", TorchCUDAKernel), ("cudnn", CudnnKernel), ("efficient", EfficientKernel)):
        assert isinstance(varlen_kernel(name, torch.device("cuda")), kind)


@pytest.mark.parametrize(
    ("name", "device"), [("flash_attn", "cpu"), ("torch", "meta"), ("triton", "cpu"), ("", "cuda")]
)
def test_no_such_kernel(name: str, device: str) -> None:
    with pytest.raises(ValueError, match=rf"no attention kernel '{name}' on device '{device}'; kernels: {KERNELS[0]}"):
        varlen_kernel(name, torch.device(device))
