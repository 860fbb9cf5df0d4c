"""The kernels that loop, in both directions, against one softmax: every mask, modifier, width and memory.

T query tokens, J key tokens, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import pytest
import torch
from torch import Tensor

from radixtrain.kernels import cpu_loops
from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.efficient import EfficientKernel
from radixtrain.kernels.flash import CudnnKernel, TorchCUDAKernel
from radixtrain.kernels.varlen import KERNELS, varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from tests.kernels.ragged_calls import ragged
from tests.support.batches import assert_exact, random_tensors, softmax_and_lse

Case = tuple[tuple[int, ...], tuple[int, ...], bool]
# lengths of the queries, lengths of the keys, causal
CASES: dict[str, Case] = {
    "causal, onto themselves": ((5, 1, 7), (5, 1, 7), True),
    "causal, fewer queries than keys": ((2, 1, 3), (5, 4, 3), True),
    "causal, one entry": ((6,), (6,), True),
    "causal, one entry, fewer queries": ((3,), (9,), True),
    "everything": ((4, 2), (3, 6), False),
    "everything, one entry": ((4,), (5,), False),
    "causal, some empty": ((2, 0, 3, 1, 0), (0, 4, 5, 1, 0), True),
    "everything, some empty": ((2, 0, 3, 1, 0), (0, 4, 5, 2, 0), False),
    "no keys": ((3, 0), (0, 0), True),
    "no queries": ((0,), (3,), True),
    "nothing": ((0, 0), (0, 0), True),
}
# Several runs of queries, and whole blocks of a kernel that nobody sees.
LONG: Case = ((300, 1, 40), (1500, 700, 40), True)
HEADS = [((2, 2), 8), ((4, 2), 17), ((4, 1), 64), ((4, 2), 64), ((4, 1), 8)]  # and their width
SCORINGS = {
    "no modifier": Scoring(0.5),
    "window of 2": Scoring(0.4, window=2),
    "window of 3": Scoring(0.4, window=3),
    "window of all": Scoring(0.4, window=9),
    "soft-cap": Scoring(0.4, softcap=0.7),
    "soft-cap and window": Scoring(0.4, softcap=0.7, window=3),
}
kernels = pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])


def distances_of(case: Case) -> Tensor:
    """Causal means that query t of an entry sees the keys up to t + J - T, the nearest of which is itself."""
    lengths_q, lengths_k, causal = case
    entries = []
    for num_q, num_k in zip(lengths_q, lengths_k, strict=True):
        last = torch.arange(num_q) + num_k - num_q if causal else torch.full((num_q,), num_k)
        entries.append((last[:, None] - torch.arange(num_k)).clamp(min=-1) + 1)
    return torch.block_diag(*entries)[: sum(lengths_q), : sum(lengths_k)] - 1


def tensors_of(case: Case, heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return random_tensors((sum(case[0]), sum(case[1])), dtype, heads, head_dim)


def by_softmax(tensors: list[Tensor], case: Case, scoring: Scoring) -> list[Tensor]:
    """out, lse, dq, dk, dv by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out, lse = softmax_and_lse(*leaves, distances=distances_of(case), **asdict(scoring))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def by_kernel(kernel: VarlenKernel, tensors: list[Tensor], call: Ragged, scoring: Scoring) -> list[Tensor]:
    """out, lse, dq, dk, dv. What is given stays as it was."""
    q, k, v, dout = tensors
    before = [x.clone() for x in tensors]
    out, lse = kernel.forward(q, k, v, call, scoring)
    forward = out.clone(), lse.clone()
    found = [*forward, *kernel.backward(dout, q, k, v, out, lse, call, scoring)]
    assert all(map(torch.equal, (*tensors, out, lse), (*before, *forward)))
    return found


def assert_same(found: list[Tensor], truth: list[Tensor], what: object) -> None:
    finite = truth[1].isfinite()
    assert torch.equal(found[1].isfinite(), finite) and (found[1][~finite] == float("-inf")).all(), what
    assert_exact(*([x[0], x[1][finite], *x[2:]] for x in (found, truth)), what)


@kernels
@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("on_host", [True, False], ids=["bounds on the host", "bounds in tensors"])
def test_exact(kernel: VarlenKernel, name: str, on_host: bool) -> None:
    """Without bounds on the host also what torch's own kernels allocate and do not write is NaN."""
    scoring = SCORINGS[name]
    if scoring.softcap and isinstance(kernel, TorchCPUKernel):
        return  # test_attention.py reads the refusal
    torch.use_deterministic_algorithms(not on_host)
    assert torch.utils.deterministic.fill_uninitialized_memory
    widths = HEADS if on_host and name == "no modifier" else HEADS[-1:]
    long = [(LONG, HEADS[-1])] if scoring.window and on_host else []
    for case, (heads, head_dim) in [*product(CASES.values(), widths), *long]:
        if case[2] or scoring.window is None:
            tensors = tensors_of(case, heads, head_dim)
            found = by_kernel(kernel, tensors, ragged(*case), scoring)
            assert_same(found, by_softmax(tensors, case, scoring), (case, heads, head_dim))


def test_eager_queries_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more scores at once than are allowed, causal entries in one piece included, and equal gradients."""
    written = []

    class Watched(Scoring):
        def of(self, products: Tensor) -> Tensor:
            written.append(products.numel())
            return super().of(products)

    monkeypatch.setattr(cpu_loops, "MOST_SCORES", 60)
    monkeypatch.setattr(cpu_loops, "LONG", 6)
    for scoring, (name, case) in product([Watched(0.4), Watched(0.4, 0.7), Watched(0.4, window=3)], CASES.items()):
        if "empty" not in name and (case[2] or scoring.window is None):
            tensors = tensors_of(case, (4, 2), 8)
            found = by_kernel(EagerKernel(), tensors, ragged(*case), scoring)
            assert_same(found, by_softmax(tensors, case, scoring), (name, scoring))
    assert max(written) <= 60


@kernels
def test_window_needs_causality(kernel: VarlenKernel) -> None:
    case = CASES["everything"]
    with pytest.raises(AssertionError, match="counts from the last key"):
        kernel.forward(*tensors_of(case, (2, 2), 8)[:3], ragged(*case), Scoring(1.0, window=2))


def slice_of_larger(x: Tensor) -> Tensor:
    larger = x.new_full((x.shape[0] + 2, x.shape[1] + 3, x.shape[2] + 5), float("nan"))
    larger[1:-1, 2:-1, 4:-1] = x
    return larger[1:-1, 2:-1, 4:-1]


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first, as Hugging Face hands them over": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice of a larger tensor": slice_of_larger,
    "strides in the last axis": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "one number, as the gradient of a sum": lambda x: torch.full_like(x[0, 0, 0], 0.7).expand_as(x),
}


@kernels
@pytest.mark.parametrize("form", STRIDED)
def test_strided_inputs(kernel: VarlenKernel, form: str) -> None:
    """Each of q, k, v and dout by itself, and all."""
    for name in ("causal, onto themselves", "causal, one entry", "everything"):
        call, tensors = ragged(*CASES[name]), tensors_of(CASES[name], (4, 2), 8)
        for which in (*range(4), None):
            views = [STRIDED[form](x) if which in (place, None) else x for place, x in enumerate(tensors)]
            expected = by_kernel(kernel, [x.contiguous() for x in views], call, Scoring(0.5))
            assert_exact(by_kernel(kernel, views, call, Scoring(0.5)), expected, (name, which))


def test_kernel_by_name() -> None:
    cuda = {"eager": EagerKernel, "torch": TorchCUDAKernel, "cudnn": CudnnKernel, "efficient": EfficientKernel}
    for name, kind in cuda.items():
        assert isinstance(varlen_kernel(name, torch.device("cuda")), kind)
    assert isinstance(varlen_kernel("torch", torch.device("cpu")), TorchCPUKernel)


@pytest.mark.parametrize(
    ("name", "device"), [("flash_attn", "cpu"), ("torch", "meta"), ("triton", "cpu"), ("", "cuda")]
)
def test_no_such_kernel(name: str, device: str) -> None:
    with pytest.raises(ValueError, match=rf"no attention kernel '{name}' on device '{device}'; kernels: {KERNELS[0]}"):
        varlen_kernel(name, torch.device(device))
