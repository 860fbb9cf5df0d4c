"""U rows, N query heads, K key/value heads, H head dim."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, product

import pytest
import torch
from one_softmax import assert_exact, one_softmax, random_tensors, with_gradients
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.merge_attention import Piece, attention_in_pieces
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel

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


def union_of(pieces: tuple[Piece, ...], num_rows: int) -> Tensor:
    """(U, U): 0 for a key that a query sees in some piece, else -1. Asserts that it sees none twice."""
    times = torch.zeros(num_rows, num_rows, dtype=torch.int64)
    for piece in pieces:
        q_rows, k_rows = (torch.arange(num_rows)[x] for x in (piece.q_rows, piece.k_rows))
        for q0, q1, k0, k1 in piece.ragged.bounds:
            q, k = q_rows[q0:q1], k_rows[k0:k1]
            seen = torch.ones(len(q), len(k), dtype=torch.int64)
            times[q[:, None], k] += seen.tril(len(k) - len(q)) if piece.ragged.causal else seen
    assert times.max() == 1
    return times - 1


def in_pieces(pieces: tuple[Piece, ...], kernel: VarlenKernel, scoring: Scoring = SCORING) -> Callable[..., Tensor]:
    return lambda q, k, v, *sinks: attention_in_pieces(q, k, v, pieces, kernel, scoring, *sinks)


SINKS = torch.tensor([-2.0, 0.0, 1.5, 40.0], dtype=torch.float64)  # from hardly there to everything


@kernels
@pytest.mark.parametrize("name", PIECES)
def test_one_softmax_over_the_union(kernel: VarlenKernel, name: str) -> None:
    attend = partial(one_softmax, distances=union_of(PIECES[name], 10), scale=SCALE)
    for heads, sinks in product([(2, 2), (4, 2), (4, 1), (4, 4)], [(), (SINKS,)]):
        tensors, own = random_tensors((10, 10), heads=heads), [each[: heads[0]] for each in sinks]
        found = with_gradients(in_pieces(PIECES[name], kernel), tensors, *own)
        assert_exact(found, with_gradients(attend, tensors, *own), heads)


def test_a_window_needs_whole_sequences() -> None:
    q, k, v, _ = random_tensors((10, 10))
    with pytest.raises(AssertionError, match="a window needs the distance"):
        attention_in_pieces(q, k, v, PIECES["slices"], EagerKernel(), Scoring(SCALE, window=2))


@kernels
def test_only_some_inputs_need_gradients(kernel: VarlenKernel) -> None:
    q, k, v, dout = random_tensors((10, 10))
    expected = with_gradients(in_pieces(PIECES["slices"], kernel), [q, k, v, dout])
    attention_in_pieces(q, k.requires_grad_(), v, PIECES["slices"], kernel, SCORING).backward(dout)
    assert_exact([k.grad], [expected[2]])
    assert q.grad is None and v.grad is None


@kernels
def test_differentiating_twice_is_refused(kernel: VarlenKernel) -> None:
    q, k, v, _ = (x.requires_grad_() for x in random_tensors((10, 10)))
    out = attention_in_pieces(q, k, v, PIECES["slices"], kernel, SCORING)
    with pytest.raises(UserError, match="create_graph=True"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)
