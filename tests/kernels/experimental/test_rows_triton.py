"""U rows, Q of a piece, N query heads, H head dim; T rows that are summed. `triton_device` runs Triton's kernels."""

import os
from math import inf

import pytest
import torch
from tiers import FULL
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="pip install triton runs it")

from radixtrain.kernels import rows as eager
from radixtrain.kernels.experimental import rows_triton
from radixtrain.kernels.experimental.rows_triton import merge_rows_, sum_rows
from radixtrain.testing import assert_within_reference_error, relative_error

pytestmark = FULL
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


@pytest.mark.parametrize("name", ROWS)
def test_merged_rows(triton_device: torch.device, name: str) -> None:
    """In every dtype of the state; 16-bit pieces go into float32."""
    tensors, rows = state(triton_device), on(triton_device, ROWS[name])
    for dtype in (torch.float32, torch.float64):
        assert_merges(tuple(x.to(dtype) for x in tensors), rows)
    out, lse, piece_out, piece_lse = (x.float() for x in tensors)
    for dtype in (torch.bfloat16, torch.float16):
        assert_merges((out, lse, piece_out.to(dtype), piece_lse), rows)


def test_merges_of_sizes(triton_device: torch.device) -> None:
    for sizes in ((1, 1, 1, 1), (40, 33, 2, 7), (17, 16, 1, 64), (16, 16, 2, 130), (5, 0, 2, 8), (0, 0, 2, 8)):
        tensors, (num_rows, num_queries) = state(triton_device, *sizes), sizes[:2]
        assert_merges(tensors, slice(num_rows - num_queries, None))
        assert_merges(tensors, torch.randperm(num_rows)[:num_queries].to(triton_device))


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


def test_weights_far_apart_overflow_nothing(triton_device: torch.device) -> None:
    out, lse, piece_out, piece_lse = (x.float() for x in state(triton_device))
    lse[0], piece_lse[1], lse[2], piece_lse[2] = 1e4, 1e4, -1e4, -1e4
    assert_merges((out, lse, piece_out, piece_lse), slice(2, 7))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_merges_of_strided_tensors(triton_device: torch.device, rows: slice | Tensor) -> None:
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


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_opcheck_of_a_merge(triton_device: torch.device, rows: slice | Tensor) -> None:
    tensors = state(triton_device, heads=2, head_dim=3)
    place = (None, rows.start) if isinstance(rows, slice) else (rows.to(triton_device), 0)
    torch.library.opcheck(rows_triton._merge_rows_, (*tensors, *place))


REPEATED = [2, 0, 2, 1, 2, 0]  # of four rows: one three times, one twice, one once, one never
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def assert_sums(x: Tensor, indices: Tensor, num_rows: int) -> None:
    """Bit for bit what torch on CPU adds up in float32, term by term, and rounds once."""
    total = sum_rows(x, indices, num_rows)
    assert total.dtype == x.dtype and total.is_contiguous()
    assert torch.equal(total.cpu(), eager.sum_rows(x.cpu(), indices.cpu(), num_rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_sum(triton_device: torch.device, dtype: torch.dtype) -> None:
    """More and fewer of one row than are in flight at once; of sizes far apart, so that the order of a sum tells."""
    for shape in [(), (1,), (3,), (2, 3), (17, 5), (1024,), (1025,), (2049,)]:
        for index_dtype in (torch.int64, torch.int32):
            indices = torch.tensor(REPEATED, dtype=index_dtype, device=triton_device)
            assert_sums(torch.randn(6, *shape, device=triton_device).to(dtype), indices, 4)
    for num_terms in (1, 3, 4, 5, 101):
        scales = torch.logspace(-3, 3, num_terms)[torch.randperm(num_terms), None]
        x = (torch.randn(num_terms, 33) * scales).to(triton_device, dtype)
        assert_sums(x, torch.randint(0, 7, (num_terms,), device=triton_device), 7)


def test_sums_of_strided_tensors(triton_device: torch.device) -> None:
    indices = torch.tensor(REPEATED, device=triton_device).repeat_interleave(2)[::2]
    for x in (
        torch.randn(3, 6, device=triton_device).t(),
        torch.randn(6, 9, device=triton_device)[:, 2::3],
        torch.randn(2, 3, 6, device=triton_device).permute(2, 1, 0),
        torch.randn(3, device=triton_device).expand(6, 3),
    ):
        assert not x.is_contiguous() and not indices.is_contiguous()
        assert_sums(x, indices, 4)


def test_opcheck_of_a_sum(triton_device: torch.device) -> None:
    order, starts = (torch.tensor(x, device=triton_device) for x in ([1, 5, 3, 0, 2, 4], [0, 2, 3, 6, 6]))
    for shape in ((), (2, 3)):
        torch.library.opcheck(rows_triton._sum_rows, (torch.randn(6, *shape, device=triton_device), order, starts))


def test_no_gradient_is_lost_in_silence(triton_device: torch.device) -> None:
    """The autograd functions of `rows.py` call it; through a direct call autograd raises."""
    x = torch.randn(6, 3, device=triton_device, requires_grad=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        sum_rows(x, torch.tensor(REPEATED, device=triton_device), 4).sum().backward()
