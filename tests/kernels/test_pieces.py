"""U rows, N query heads, K key/value heads, H head dim."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from radixtrain.kernels.looping import EagerKernel, TorchCPUKernel
from radixtrain.kernels.pieces import Piece, attention_in_pieces
from radixtrain.kernels.ragged import Ragged, VarlenKernel
from radixtrain.kernels.scoring import Scoring
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, relative_error

SCALE = 0.6
SCORING = Scoring(SCALE)
NAMES = ("out", "dq", "dk", "dv")
EVERYTHING = slice(None)

kernels = pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])


def ragged(lengths_q: list[int], lengths_k: list[int], causal: bool = False) -> Ragged:
    cu_q, cu_k = ([0, *accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    bounds = tuple(zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True))
    as_tensors = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    return Ragged(*as_tensors, max(lengths_q, default=0), max(lengths_k, default=0), causal, bounds)


def some_pieces(size: int) -> dict[str, tuple[Piece, ...]]:
    """Ten runs of rows: 0-2 are the trunk; 3-4 and 5-7 its branches; 8-9 hang below 3-4, and two pieces meet there."""

    def runs(lengths_q: list[int], lengths_k: list[int], causal: bool = False) -> Ragged:
        return ragged([n * size for n in lengths_q], [n * size for n in lengths_k], causal)

    def cut(start: int, end: int) -> slice:
        return slice(start * size, end * size)

    def rows(*indices: int) -> Tensor:
        return (torch.tensor(indices)[:, None] * size + torch.arange(size)).flatten()

    own = Piece(EVERYTHING, EVERYTHING, runs([3, 2, 3, 2], [3, 2, 3, 2], causal=True))
    return {
        "only own rows": (own,),
        "slices": (
            own,
            Piece(cut(3, 10), cut(0, 3), runs([7], [3])),
            Piece(cut(8, 10), cut(3, 5), runs([2], [2])),
        ),
        "index tensors": (
            own,
            Piece(rows(9, 3, 4, 5, 8), rows(2, 0, 1), runs([5], [3])),
            Piece(rows(6, 7, 9, 8), rows(0, 1, 4, 3), runs([2, 2], [2, 2])),
        ),
        "indexed queries, sliced keys": (own, Piece(rows(3, 9, 7), cut(0, 3), runs([1, 2], [2, 1]))),
        "sliced queries, indexed keys": (own, Piece(cut(5, 8), rows(2, 0, 4), runs([3], [3]))),
        "entries without keys and without queries": (
            Piece(EVERYTHING, EVERYTHING, runs([3, 2, 3, 0, 2], [3, 0, 3, 4, 0], causal=True)),
            Piece(cut(3, 5), cut(0, 3), runs([2], [3])),
            Piece(rows(8, 9), rows(3, 4), runs([1, 1], [1, 1])),
        ),
    }


PIECES = some_pieces(size=1)
pieces = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


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


def one_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float = SCALE) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(groups, 1)) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v.repeat_interleave(groups, 1))


def inputs(
    dtype: torch.dtype, num_heads: int = 4, num_groups: int = 2, head_dim: int = 8, num_rows: int = 10
) -> list[Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(1)
    heads = (num_heads, num_groups, num_groups, num_heads)
    return [torch.randn(num_rows, n, head_dim, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def with_gradients(function, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@kernels
@pieces
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
def test_one_softmax_over_the_union(kernel: VarlenKernel, pieces: tuple[Piece, ...], heads: tuple[int, int]) -> None:
    tensors, mask = inputs(torch.float64, *heads), union_mask(pieces, 10)
    truth = with_gradients(lambda q, k, v: one_softmax(q, k, v, mask), *tensors)
    actual = with_gradients(lambda q, k, v: attention_in_pieces(q, k, v, pieces, kernel, SCORING), *tensors)
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, actual, truth, strict=True)}
    assert max(errors.values()) <= 1e-12, errors


@kernels
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_lower_precision(kernel: VarlenKernel, name: str, dtype: torch.dtype) -> None:
    pieces, scale = some_pieces(size=12)[name], 32**-0.5  # enough rows to average out luck, scores of order one
    tensors, mask = inputs(dtype, head_dim=32, num_rows=120), union_mask(pieces, 120)
    truth = with_gradients(lambda q, k, v: one_softmax(q, k, v, mask, scale), *(x.double() for x in tensors))
    out, _, *grads = flash_attention_by_the_book(*tensors, mask, scale)
    actual = with_gradients(lambda q, k, v: attention_in_pieces(q, k, v, pieces, kernel, Scoring(scale)), *tensors)
    assert [x.dtype for x in actual] == [dtype] * 4
    assert_within_reference_error(actual, [out, *grads], truth, names=NAMES)


def with_sinks(mask: Tensor, scale: float, dtype: torch.dtype):
    """One softmax over the keys and a last column that has no value, as Hugging Face's eager gpt-oss computes it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(groups, 1)) * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        column = sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return torch.einsum("nqk,knh->qnh", weights, v.repeat_interleave(groups, 1))

    return attend


def with_all_gradients(function, sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


SINKS = torch.tensor([-2.0, 0.0, 1.5, 40.0], dtype=torch.float64)  # from hardly there to everything


@kernels
@pieces
@pytest.mark.parametrize("num_groups", [1, 4])
def test_sinks(kernel: VarlenKernel, pieces: tuple[Piece, ...], num_groups: int) -> None:
    tensors, mask = inputs(torch.float64, 4, num_groups), union_mask(pieces, 10)
    truth = with_all_gradients(with_sinks(mask, SCALE, torch.float64), SINKS, *tensors)
    actual = with_all_gradients(
        lambda q, k, v, s: attention_in_pieces(q, k, v, pieces, kernel, SCORING, s), SINKS, *tensors
    )
    errors = {name: relative_error(x, y) for name, x, y in zip((*NAMES, "dsinks"), actual, truth, strict=True)}
    assert max(errors.values()) <= 1e-12, errors


@kernels
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sinks_in_lower_precision(kernel: VarlenKernel, name: str, dtype: torch.dtype) -> None:
    pieces, scale = some_pieces(size=12)[name], 0.25
    tensors, mask = inputs(dtype, 32, 8, 32, num_rows=120), union_mask(pieces, 120)
    sinks = torch.linspace(-1, 3, 32, dtype=torch.float64).to(dtype)  # 32 of them, for luck to average out
    wide = [x.double() for x in tensors]
    truth = with_all_gradients(with_sinks(mask, scale, torch.float64), sinks.double(), *wide)
    actual = with_all_gradients(
        lambda q, k, v, s: attention_in_pieces(q, k, v, pieces, kernel, Scoring(scale), s), sinks, *tensors
    )
    assert [x.dtype for x in actual] == [dtype] * 5
    reference = sinks_by_the_book(*tensors, sinks, mask, scale)
    assert_within_reference_error(actual, reference, truth, names=(*NAMES, "dsinks"))


def sinks_by_the_book(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor, mask: Tensor, scale: float
) -> list[Tensor]:
    """A sink is a key that every query meets with the same score: one more axis, 1 in q and s / scale in its key."""
    groups, num_rows = q.shape[1] // k.shape[1], len(q)

    def longer(x: Tensor, last: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, 1), value=last)

    k_all, v_all = (longer(x.repeat_interleave(groups, 1), 0.0) for x in (k, v))
    sink_key = torch.zeros_like(k_all[:1])
    sink_key[0, :, -1] = sinks / scale  # exact in every dtype, the scale being a power of two
    keys, values = torch.cat([k_all, sink_key]), torch.cat([v_all, torch.zeros_like(sink_key)])
    seen = torch.nn.functional.pad(mask, (0, 1), value=True)
    out, _, dq, dk, dv = flash_attention_by_the_book(longer(q, 1.0), keys, values, longer(dout, 0.0), seen, scale)
    dk_group, dv_group = (x[:num_rows, :, :-1].float().unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    dsinks = dk[num_rows, :, -1] / scale
    return [out[..., :-1], dq[..., :-1], dk_group.to(k.dtype), dv_group.to(v.dtype), dsinks]


@kernels
@pieces
def test_sinks_that_nothing_falls_into_change_nothing(kernel: VarlenKernel, pieces: tuple[Piece, ...]) -> None:
    tensors, nothing = inputs(torch.float64), torch.full((4,), float("-inf"), dtype=torch.float64)
    without = with_gradients(lambda q, k, v: attention_in_pieces(q, k, v, pieces, kernel, SCORING), *tensors)
    *actual, dsinks = with_all_gradients(
        lambda q, k, v, s: attention_in_pieces(q, k, v, pieces, kernel, SCORING, s), nothing, *tensors
    )
    assert all(torch.equal(x, y) for x, y in zip(actual, without, strict=True))
    assert not dsinks.any()


@pieces
def test_soft_capped_pieces_merge(pieces: tuple[Piece, ...]) -> None:
    tensors, mask = inputs(torch.float64), union_mask(pieces, 10)

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(2, 1)) * SCALE
        scores = (0.8 * torch.tanh(scores / 0.8)).masked_fill(~mask, float("-inf"))
        return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v.repeat_interleave(2, 1))

    scoring = Scoring(SCALE, softcap=0.8)
    truth = with_gradients(capped, *tensors)
    actual = with_gradients(lambda q, k, v: attention_in_pieces(q, k, v, pieces, EagerKernel(), scoring), *tensors)
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, actual, truth, strict=True)}
    assert max(errors.values()) <= 1e-12, errors


def test_a_window_needs_whole_sequences() -> None:
    q, k, v, _ = inputs(torch.float64)
    with pytest.raises(AssertionError, match="a window needs the distance"):
        attention_in_pieces(q, k, v, PIECES["slices"], EagerKernel(), Scoring(SCALE, window=2))


@kernels
@pieces
def test_gradcheck_with_sinks(kernel: VarlenKernel, pieces: tuple[Piece, ...]) -> None:
    leaves = [x.requires_grad_() for x in (*inputs(torch.float64, 2, 1, 3)[:3], SINKS[1:3].clone())]
    assert gradcheck(
        lambda q, k, v, s: attention_in_pieces(q, k, v, pieces, kernel, SCORING, s), leaves, fast_mode=True
    )


@kernels
@pieces
def test_gradcheck(kernel: VarlenKernel, pieces: tuple[Piece, ...]) -> None:
    leaves = [x.requires_grad_() for x in inputs(torch.float64, 2, 1, 3)[:3]]
    assert gradcheck(lambda q, k, v: attention_in_pieces(q, k, v, pieces, kernel, SCORING), leaves, fast_mode=True)


@kernels
def test_order_of_the_pieces_does_not_matter(kernel: VarlenKernel) -> None:
    own, trunk, below = PIECES["slices"]
    tensors = inputs(torch.float64)
    one, other = (
        with_gradients(lambda q, k, v, p=order: attention_in_pieces(q, k, v, p, kernel, SCORING), *tensors)
        for order in ((own, trunk, below), (own, below, trunk))
    )
    assert max(relative_error(x, y) for x, y in zip(one, other, strict=True)) <= 1e-12


@kernels
def test_only_some_inputs_need_gradients(kernel: VarlenKernel) -> None:
    q, k, v, dout = inputs(torch.float64)
    expected = with_gradients(lambda *x: attention_in_pieces(*x, PIECES["slices"], kernel, SCORING), q, k, v, dout)
    k.requires_grad_()
    attention_in_pieces(q, k, v, PIECES["slices"], kernel, SCORING).backward(dout)
    assert torch.equal(k.grad, expected[2])
    assert q.grad is None and v.grad is None


@kernels
def test_inputs_are_left_alone_and_the_graph_can_be_kept(kernel: VarlenKernel) -> None:
    *leaves, dout = inputs(torch.float64)
    before = [x.clone() for x in (*leaves, dout)]
    for x in leaves:
        x.requires_grad_()
    out = attention_in_pieces(*leaves, PIECES["index tensors"], kernel, SCORING)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert all(torch.equal(x.detach(), y) for x, y in zip((*leaves, dout), before, strict=True))


@kernels
def test_differentiating_twice_is_refused(kernel: VarlenKernel) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(torch.float64))
    out = attention_in_pieces(q, k, v, PIECES["slices"], kernel, SCORING)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@kernels
def test_no_rows(kernel: VarlenKernel) -> None:
    q, k, v = (torch.zeros(0, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = attention_in_pieces(q, k, v, (Piece(EVERYTHING, EVERYTHING, ragged([], [], causal=True)),), kernel, SCORING)
    out.sum().backward()
    assert out.shape == q.grad.shape == (0, 4, 8)
