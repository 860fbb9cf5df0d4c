"""U rows, Q of them in a piece, N query heads, H head dim. `triton_device` is the device of Triton's kernels."""

import os
from math import inf

import pytest
import torch
from tiers import FULL, cases
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
    """About as near to float64 as the formula in the dtype of the state."""
    out, lse, piece_out, piece_lse = given
    truth = merged_by_the_book(out.double(), lse.double(), rows, piece_out.double(), piece_lse.double())
    reference = merged_by_the_book(out, lse, rows, piece_out, piece_lse)
    actual = merged(out, lse, rows, piece_out, piece_lse)
    if out.dtype == torch.float64:
        assert max(relative_error(x, y) for x, y in zip(actual, truth, strict=True)) <= 1e-12
    else:
        assert_within_reference_error(actual, reference, truth, names=("out", "lse"))
    untouched = torch.ones(len(out), dtype=torch.bool)
    untouched[rows if isinstance(rows, slice) else rows.cpu().long()] = False
    assert torch.equal(actual[0][untouched], out[untouched])
    assert torch.equal(actual[1][:, untouched], lse[:, untouched])


@pytest.mark.parametrize("name", cases(ROWS, ["indices"]))
def test_rows(triton_device: torch.device, name: str) -> None:
    """In every dtype of the state; 16-bit pieces go into float32."""
    tensors, rows = state(triton_device), on(triton_device, ROWS[name])
    for dtype in (torch.float32, torch.float64):
        assert_merges(tuple(x.to(dtype) for x in tensors), rows)
    out, lse, piece_out, piece_lse = (x.float() for x in tensors)
    for dtype in (torch.bfloat16, torch.float16):
        assert_merges((out, lse, piece_out.to(dtype), piece_lse), rows)


@FULL
def test_sizes(triton_device: torch.device) -> None:
    for sizes in ((1, 1, 1, 1), (40, 33, 2, 7), (17, 16, 1, 64), (16, 16, 2, 130), (5, 0, 2, 8), (0, 0, 2, 8)):
        tensors, (num_rows, num_queries) = state(triton_device, *sizes), sizes[:2]
        assert_merges(tensors, slice(num_rows - num_queries, None))
        assert_merges(tensors, torch.randperm(num_rows)[:num_queries].to(triton_device))


@FULL
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_sides_without_keys(triton_device: torch.device, rows: slice | Tensor) -> None:
    out, lse, piece_out, piece_lse = state(triton_device)
    rows = on(triton_device, rows)
    first, second, third = range(2, 5) if isinstance(rows, slice) else INDICES[:3]
    lse[:, first] = lse[:, second] = -inf
    piece_lse[:, 1] = piece_lse[:, 2] = -inf
    total, total_lse = merged(out, lse, rows, piece_out, piece_lse)
    assert relative_error(total[first], piece_out[0]) <= 1e-12
    assert relative_error(total_lse[:, first], piece_lse[:, 0]) <= 1e-12
    assert not total[second].any() and (total_lse[:, second] == -inf).all()
    assert relative_error(total[third], out[third]) <= 1e-12
    assert relative_error(total_lse[:, third], lse[:, third]) <= 1e-12
    assert not total.isnan().any() and not total_lse.isnan().any()


@FULL
def test_weights_far_apart_overflow_nothing(triton_device: torch.device) -> None:
    out, lse, piece_out, piece_lse = (x.float() for x in state(triton_device))
    lse[0], piece_lse[1], lse[2], piece_lse[2] = 1e4, 1e4, -1e4, -1e4
    assert_merges((out, lse, piece_out, piece_lse), slice(2, 7))


@FULL
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
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
        assert relative_error(own_out, expected[0]) <= 1e-12 and relative_error(own_lse, expected[1]) <= 1e-12


@FULL
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_opcheck(triton_device: torch.device, rows: slice | Tensor) -> None:
    tensors = state(triton_device, heads=2, head_dim=3)
    place = (None, rows.start) if isinstance(rows, slice) else (rows.to(triton_device), 0)
    torch.library.opcheck(merge_triton._merge_rows_, (*tensors, *place))


@FULL
def test_refusals(triton_device: torch.device) -> None:
    out, lse, piece_out, piece_lse = state(triton_device)
    with pytest.raises(RuntimeError, match="not differentiable: call it under no_grad"):
        merge_rows_(out, lse, slice(2, 7), piece_out.clone().requires_grad_(), piece_lse)
    for rows, *tensors, message in (
        (slice(2, 6), lse, piece_out, piece_lse, r"piece_out must have shape \(4, 3, 20\), got \(5, 3, 20\)"),
        (slice(2, 7), lse.t(), piece_out, piece_lse, r"lse must have shape \(3, 10\), got \(10, 3\)"),
        (slice(2, 7), lse, piece_out, piece_lse.t(), r"piece_lse must have shape \(3, 5\), got \(5, 3\)"),
        (slice(2, 7, 2), lse, piece_out, piece_lse, "must not have a step"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_rows_(out, tensors[0], rows, *tensors[1:])
