"""U rows, Q of them in a piece, N query heads, H head dim. `triton_device` is the device of Triton's kernels."""

import os
from math import inf, log, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="pip install triton runs it")

from radixtrain.kernels import merge_triton
from radixtrain.kernels.merge_triton import merge_rows_
from radixtrain.testing import assert_within_reference_error, relative_error

State = tuple[Tensor, Tensor, Tensor, Tensor]  # out (U, N, H), lse (N, U), piece_out (Q, N, H), piece_lse (N, Q)

INDICES = [3, 9, 0, 4, 6]
ROWS = {"slice": slice(2, 7), "indices": torch.tensor(INDICES), "int32": torch.tensor(INDICES, dtype=torch.int32)}
every_kind_of_rows = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)


def merged_by_the_book(
    out: Tensor, lse: Tensor, rows: slice | Tensor, piece_out: Tensor, piece_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The formula, in the dtype of out."""
    rows = rows if isinstance(rows, slice) else rows.long()
    total = torch.logaddexp(lse[:, rows], piece_lse)
    old, new = (torch.exp(x - total).nan_to_num(0).t()[..., None] for x in (lse[:, rows], piece_lse))
    out, lse = out.clone(), lse.clone()
    out[rows], lse[:, rows] = out[rows] * old + piece_out.to(out.dtype) * new, total
    return out, lse


def state(device: torch.device, num_rows: int = 10, num_queries: int = 5, heads: int = 3, head_dim: int = 20) -> State:
    """Of float64 from float32 numbers. The sides weigh alike, or one by far more."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_rows, heads, head_dim), (heads, num_rows), (num_queries, heads, head_dim), (heads, num_queries)
    tensors = [
        torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, (1, 3, 1, 3), strict=True)
    ]
    return tuple(x.to(device, torch.float64) for x in tensors)


def merged(
    out: Tensor, lse: Tensor, rows: slice | Tensor, piece_out: Tensor, piece_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """What `merge_rows_` makes of copies."""
    out, lse = out.clone(), lse.clone()
    merge_rows_(out, lse, rows, piece_out, piece_lse)
    return out, lse


def on(device: torch.device, rows: slice | Tensor) -> slice | Tensor:
    return rows if isinstance(rows, slice) else rows.to(device)


def assert_merges(given: State, rows: slice | Tensor) -> None:
    """About as near to float64 as the formula in the dtype of the state.

    In float64 the bar is the roundings of an element: two exp, a sum, two divisions, two products, a sum.
    """
    out, lse, piece_out, piece_lse = given
    truth = merged_by_the_book(out.double(), lse.double(), rows, piece_out.double(), piece_lse.double())
    reference = merged_by_the_book(out, lse, rows, piece_out, piece_lse)
    actual = merged(out, lse, rows, piece_out, piece_lse)
    if out.dtype == torch.float64:
        errors = [relative_error(x, y) for x, y in zip(actual, truth, strict=True)]
        assert max(errors) <= 8 * torch.finfo(torch.float64).eps / 2, errors
    else:
        assert_within_reference_error(actual, reference, truth, names=("out", "lse"))
    untouched = torch.ones(len(out), dtype=torch.bool)
    untouched[rows if isinstance(rows, slice) else rows.cpu().long()] = False
    assert torch.equal(actual[0][untouched], out[untouched])
    assert torch.equal(actual[1][:, untouched], lse[:, untouched])


def test_literally(triton_device: torch.device) -> None:
    """Three keys of weight 1 in out, one in the piece; a side without keys; both without."""
    out = torch.tensor([nan, 8.0, 8.0, nan, nan], device=triton_device)[:, None, None]
    lse = torch.tensor([[7.0, log(3), log(3), -inf, -inf]], device=triton_device)
    piece_out = torch.tensor([4.0, nan, 4.0, nan], device=triton_device)[:, None, None]
    piece_lse = torch.tensor([[0.0, -inf, 0.0, -inf]], device=triton_device)
    merge_rows_(out, lse, slice(1, None), piece_out, piece_lse)
    assert out[1:].flatten().tolist() == pytest.approx([7.0, 8.0, 4.0, 0.0], rel=1e-6)
    assert lse[0].tolist() == pytest.approx([7.0, log(4), log(3), 0.0, -inf], rel=1e-6)
    assert out[0].isnan().all()


@every_kind_of_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows(triton_device: torch.device, rows: slice | Tensor, dtype: torch.dtype) -> None:
    tensors = state(triton_device)
    assert_merges(tuple(x.to(dtype) for x in tensors), on(triton_device, rows))


@every_kind_of_rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_pieces_into_float32(triton_device: torch.device, rows: slice | Tensor, dtype: torch.dtype) -> None:
    out, lse, piece_out, piece_lse = (x.float() for x in state(triton_device))
    assert_merges((out, lse, piece_out.to(dtype), piece_lse), on(triton_device, rows))


@pytest.mark.parametrize(
    ("num_rows", "num_queries", "heads", "head_dim"),
    [
        (1, 1, 1, 1),
        (40, 33, 2, 7),
        (17, 16, 1, 64),
        (16, 16, 2, 130),
        (5, 0, 2, 8),
        (0, 0, 2, 8),
    ],
)
def test_sizes(triton_device: torch.device, num_rows: int, num_queries: int, heads: int, head_dim: int) -> None:
    tensors = state(triton_device, num_rows, num_queries, heads, head_dim)
    assert_merges(tensors, slice(num_rows - num_queries, None))
    assert_merges(tensors, torch.randperm(num_rows)[:num_queries].to(triton_device))


@every_kind_of_rows
def test_sides_without_keys(triton_device: torch.device, rows: slice | Tensor) -> None:
    out, lse, piece_out, piece_lse = state(triton_device)
    rows = on(triton_device, rows)
    first, second, third = range(2, 5) if isinstance(rows, slice) else INDICES[:3]
    lse[:, first] = lse[:, second] = -inf
    piece_lse[:, 1] = piece_lse[:, 2] = -inf
    total, total_lse = merged(out, lse, rows, piece_out, piece_lse)
    assert torch.equal(total[first], piece_out[0]) and torch.equal(total_lse[:, first], piece_lse[:, 0])
    assert not total[second].any() and (total_lse[:, second] == -inf).all()
    assert torch.equal(total[third], out[third]) and torch.equal(total_lse[:, third], lse[:, third])
    assert not total.isnan().any() and not total_lse.isnan().any()


def test_weights_far_apart_overflow_nothing(triton_device: torch.device) -> None:
    out, lse, piece_out, piece_lse = (x.float() for x in state(triton_device))
    lse[0], piece_lse[1], lse[2], piece_lse[2] = 1e4, 1e4, -1e4, -1e4
    assert_merges((out, lse, piece_out, piece_lse), slice(2, 7))


@every_kind_of_rows
def test_non_contiguous(triton_device: torch.device, rows: slice | Tensor) -> None:
    out, lse, piece_out, piece_lse = state(triton_device)
    rows = rows if isinstance(rows, slice) else on(triton_device, rows).repeat_interleave(2)[::2]
    expected = merged(out, lse, rows, piece_out, piece_lse)
    swapped = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in (out, lse, piece_out, piece_lse)]
    strided = [x.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3] for x in (out, lse, piece_out, piece_lse)]
    for tensors in (swapped, strided):
        assert not any(x.is_contiguous() for x in tensors)
        own_out, own_lse, *piece = tensors
        merge_rows_(own_out, own_lse, rows, *piece)
        assert torch.equal(own_out, expected[0]) and torch.equal(own_lse, expected[1])


@every_kind_of_rows
def test_opcheck(triton_device: torch.device, rows: slice | Tensor) -> None:
    tensors = state(triton_device, heads=2, head_dim=3)
    place = (None, rows.start) if isinstance(rows, slice) else (rows.to(triton_device), 0)
    torch.library.opcheck(merge_triton._merge_rows_, (*tensors, *place))


def test_generated_merges_in_any_order(triton_device: torch.device) -> None:
    """The keys of a row, cut into pieces and merged one after the other, are one softmax."""

    @settings(max_examples=15, deadline=None, database=None)
    @given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5), seed=st.integers(0, 99))
    def one(sizes: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_keys = sum(sizes)
        scores, values = (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(triton_device)
            for shape in ((2, 3, num_keys), (num_keys, 2, 4))
        )
        out, lse = torch.full((3, 2, 4), nan), torch.full((2, 3), -inf)
        out, lse = out.to(scores), lse.to(scores)
        for s, v in zip(scores.split(sizes, -1), values.split(sizes), strict=True):
            merge_rows_(out, lse, slice(None), torch.einsum("nqk,knh->qnh", s.softmax(-1), v), s.logsumexp(-1))
        whole = torch.einsum("nqk,knh->qnh", scores.softmax(-1), values)
        assert torch.allclose(out, whole, rtol=0, atol=1e-12)
        assert torch.allclose(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)

    one()


def test_in_place_refuses_to_be_recorded(triton_device: torch.device) -> None:
    out, lse, piece_out, piece_lse = state(triton_device)
    with pytest.raises(RuntimeError, match="not differentiable: call it under no_grad"):
        merge_rows_(out, lse, slice(2, 7), piece_out.requires_grad_(), piece_lse)
    with torch.no_grad():
        merge_rows_(out, lse, slice(2, 7), piece_out, piece_lse)


def test_shapes_that_do_not_fit(triton_device: torch.device) -> None:
    out, lse, piece_out, piece_lse = state(triton_device)
    for rows, *tensors, message in (
        (slice(2, 6), lse, piece_out, piece_lse, r"piece_out must have shape \(4, 3, 20\), got \(5, 3, 20\)"),
        (slice(2, 7), lse.t(), piece_out, piece_lse, r"lse must have shape \(3, 10\), got \(10, 3\)"),
        (slice(2, 7), lse, piece_out, piece_lse.t(), r"piece_lse must have shape \(3, 5\), got \(5, 3\)"),
        (slice(2, 7, 2), lse, piece_out, piece_lse, "must not have a step"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_rows_(out, tensors[0], rows, *tensors[1:])
