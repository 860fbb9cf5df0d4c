"""U rows, N query heads, K key/value heads, H head dim."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.merge_attention import Piece, attention_in_pieces
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from radixtrain.testing import relative_error

SCALE = 0.6
SCORING = Scoring(SCALE)
EVERYTHING = slice(None)

kernels = pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])


def ragged(lengths_q: list[int], lengths_k: list[int], causal: bool = False) -> Ragged:
    cu_q, cu_k = ([0, *accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    bounds = tuple(zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True))
    as_tensors = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    return Ragged(*as_tensors, max(lengths_q, default=0), max(lengths_k, default=0), causal, bounds)


# Ten rows: 0-2 are the trunk; 3-4 and 5-7 its branches; 8-9 hang below 3-4, and two pieces meet there.
OWN = Piece(EVERYTHING, EVERYTHING, ragged([3, 2, 3, 2], [3, 2, 3, 2], causal=True))
PIECES = {
    "only own rows": (OWN,),
    "slices": (
        OWN,
        Piece(slice(3, 10), slice(0, 3), ragged([7], [3])),
        Piece(slice(8, 10), slice(3, 5), ragged([2], [2])),
    ),
    "index tensors": (
        OWN,
        Piece(torch.tensor([9, 3, 4, 5, 8]), torch.tensor([2, 0, 1]), ragged([5], [3])),
        Piece(torch.tensor([6, 7, 9, 8]), torch.tensor([0, 1, 4, 3]), ragged([2, 2], [2, 2])),
    ),
    "indexed queries, sliced keys": (OWN, Piece(torch.tensor([3, 9, 7]), slice(0, 3), ragged([1, 2], [2, 1]))),
    "sliced queries, indexed keys": (OWN, Piece(slice(5, 8), torch.tensor([2, 0, 4]), ragged([3], [3]))),
    "entries without keys and without queries": (
        Piece(EVERYTHING, EVERYTHING, ragged([3, 2, 3, 0, 2], [3, 0, 3, 4, 0], causal=True)),
        Piece(slice(3, 5), slice(0, 3), ragged([2], [3])),
        Piece(torch.tensor([8, 9]), torch.tensor([3, 4]), ragged([1, 1], [1, 1])),
    ),
}


def union_mask(pieces: tuple[Piece, ...], num_rows: int) -> Tensor:
    """(U, U), bool: which keys a query sees in any piece. Asserts that it sees none twice."""
    times = torch.zeros(num_rows, num_rows, dtype=torch.int64)
    for piece in pieces:
        q_rows, k_rows = (torch.arange(num_rows)[x] for x in (piece.q_rows, piece.k_rows))
        for q0, q1, k0, k1 in piece.ragged.bounds:
            q, k = q_rows[q0:q1], k_rows[k0:k1]
            seen = torch.ones(len(q), len(k), dtype=torch.int64)
            times[q[:, None], k] += seen.tril(len(k) - len(q)) if piece.ragged.causal else seen
    assert times.max() == 1
    return times.bool()


def one_softmax(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, mask: Tensor, scoring: Scoring = SCORING
) -> Tensor:
    """Over the keys, and a last column without a value, as Hugging Face's eager gpt-oss computes sinks."""
    groups = q.shape[1] // k.shape[1]
    scores = scoring.of(torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(groups, 1)))
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1)[..., : len(k)], v.repeat_interleave(groups, 1))


def inputs(
    dtype: torch.dtype, num_heads: int = 4, num_groups: int = 2, head_dim: int = 8, num_rows: int = 10
) -> list[Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(1)
    heads = (num_heads, num_groups, num_groups, num_heads)
    return [torch.randn(num_rows, n, head_dim, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], *sinks: Tensor) -> list[Tensor]:
    """out, dq, dk, dv, and dsinks if there are sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors[:3], *sinks)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def in_pieces(pieces: tuple[Piece, ...], kernel: VarlenKernel, scoring: Scoring = SCORING) -> Callable[..., Tensor]:
    return lambda q, k, v, *sinks: attention_in_pieces(q, k, v, pieces, kernel, scoring, *sinks)


def assert_equal_in_float64(actual: list[Tensor], truth: list[Tensor], what: str = "") -> None:
    errors = [relative_error(x, y) for x, y in zip(actual, truth, strict=True)]
    assert max(errors) <= 1e-12, (what, errors)


SINKS = torch.tensor([-2.0, 0.0, 1.5, 40.0], dtype=torch.float64)  # from hardly there to everything


@kernels
@pytest.mark.parametrize("name", PIECES)
def test_one_softmax_over_the_union(kernel: VarlenKernel, name: str) -> None:
    mask = union_mask(PIECES[name], 10)
    for heads, sinks in product([(2, 2), (4, 2), (4, 1), (4, 4)], [(), (SINKS,)]):
        tensors, own = inputs(torch.float64, *heads), [each[: heads[0]] for each in sinks]
        truth = with_gradients(partial(one_softmax, mask=mask), tensors, *own)
        assert_equal_in_float64(with_gradients(in_pieces(PIECES[name], kernel), tensors, *own), truth)


def test_a_window_needs_whole_sequences() -> None:
    q, k, v, _ = inputs(torch.float64)
    with pytest.raises(AssertionError, match="a window needs the distance"):
        attention_in_pieces(q, k, v, PIECES["slices"], EagerKernel(), Scoring(SCALE, window=2))


@kernels
@pytest.mark.parametrize("name", PIECES)
def test_gradcheck(kernel: VarlenKernel, name: str) -> None:
    leaves = [x.requires_grad_() for x in (*inputs(torch.float64, 2, 1, 3)[:3], SINKS[1:3].clone())]
    attend = in_pieces(PIECES[name], kernel)
    assert gradcheck(attend, leaves[:3], fast_mode=True) and gradcheck(attend, leaves, fast_mode=True)


@kernels
def test_only_some_inputs_need_gradients(kernel: VarlenKernel) -> None:
    q, k, v, dout = inputs(torch.float64)
    expected = with_gradients(in_pieces(PIECES["slices"], kernel), [q, k, v, dout])
    attention_in_pieces(q, k.requires_grad_(), v, PIECES["slices"], kernel, SCORING).backward(dout)
    assert relative_error(k.grad, expected[2]) <= 1e-12
    assert q.grad is None and v.grad is None


@kernels
def test_differentiating_twice_is_refused(kernel: VarlenKernel) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(torch.float64))
    out = attention_in_pieces(q, k, v, PIECES["slices"], kernel, SCORING)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
