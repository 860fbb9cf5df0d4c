"""T packed tokens, U unique rows. `triton_device` is the device of Triton's kernels."""

import os
from collections.abc import Callable
from itertools import product

import pytest
import torch
from tiers import FULL, cases
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="pip install triton runs it")

from radixtrain.kernels import rows as eager
from radixtrain.kernels import rows_triton
from radixtrain.kernels.row_order import RowOrder, row_order
from radixtrain.kernels.rows_triton import gather_rows, sum_rows

REPEATED = [2, 0, 2, 1, 2, 0]  # of four rows: one three times, one twice, one once, one never
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPS = {"gather": (rows_triton._gather_rows, 4, ("indices",)), "sum": (rows_triton._sum_rows, 6, ("order", "starts"))}


def repeated(device: torch.device, dtype: torch.dtype = torch.int64) -> RowOrder:
    return row_order(torch.tensor(REPEATED, dtype=dtype, device=device), 4)


def assert_both_match(rows: RowOrder, x: Tensor, grad: Tensor) -> None:
    """Bit for bit what torch on CPU gathers, and what it adds up in float32, token by token, and rounds once."""
    indices = rows.indices.cpu()
    assert torch.equal(gather_rows(x, rows).cpu(), x.cpu()[indices])
    total = sum_rows(grad, rows)
    assert total.dtype == grad.dtype and total.is_contiguous()
    assert torch.equal(total.cpu(), eager.sum_rows(grad.cpu(), indices, rows.num_rows))


def test_order_literally() -> None:
    rows = row_order(torch.tensor(REPEATED), 4)
    assert rows.order.tolist() == [1, 5, 3, 0, 2, 4]
    assert rows.starts.tolist() == [0, 2, 3, 6, 6]
    assert (rows.order.dtype, rows.starts.dtype, rows.num_rows) == (torch.int32, torch.int32, 4)
    assert all(torch.equal(x, y) for x, y in zip(vars(rows.to("cpu")).values(), vars(rows).values(), strict=True))


def test_order_refuses_rows_that_are_not_there() -> None:
    for indices in ([0, 4], [-1, 3]):
        with pytest.raises(ValueError, match=r"indices must lie in \[0, 4\), got"):
            row_order(torch.tensor(indices), 4)


@pytest.mark.parametrize(("op", "num_rows"), [(gather_rows, 4), (sum_rows, 6)])
def test_no_gradient_is_lost_in_silence(triton_device: torch.device, op: Callable[..., Tensor], num_rows: int) -> None:
    """The autograd functions of `rows.py` call them; through a direct call autograd raises."""
    out = op(torch.randn(num_rows, 3, device=triton_device, requires_grad=True), repeated(triton_device))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


@FULL
@pytest.mark.parametrize("op", OPS)
def test_opcheck(triton_device: torch.device, op: str) -> None:
    function, num_rows, names = OPS[op]
    for shape, dtype in product([(), (2, 3)], [torch.float64, torch.float32]):
        x = torch.randn(num_rows, *shape, dtype=dtype, device=triton_device)
        torch.library.opcheck(function, (x, *(vars(repeated(triton_device))[name] for name in names)))


@pytest.mark.parametrize("dtype", cases(DTYPES, [torch.float32]))
def test_bits(triton_device: torch.device, dtype: torch.dtype) -> None:
    for shape in [(), (1,), (3,), (2, 3), (17, 5), (1024,), (1025,), (2049,)]:
        x, grad = (torch.randn(n, *shape, device=triton_device).to(dtype) for n in (4, 6))
        assert_both_match(repeated(triton_device), x, grad)
    assert_both_match(repeated(triton_device, torch.int32), x, grad)


@FULL
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_many_tokens(triton_device: torch.device, dtype: torch.dtype) -> None:
    """More and fewer of one row than are in flight at once; of sizes far apart, so that the order of a sum tells."""
    for num_tokens in (1, 3, 4, 5, 101):
        rows = row_order(torch.randint(0, 7, (num_tokens,)), 7).to(triton_device)
        scales = torch.logspace(-3, 3, num_tokens)[torch.randperm(num_tokens), None]
        grad = (torch.randn(num_tokens, 33) * scales).to(triton_device, dtype)
        assert_both_match(rows, torch.randn(7, 33, device=triton_device).to(dtype), grad)


@FULL
def test_non_contiguous_rows_indices_and_gradients(triton_device: torch.device) -> None:
    device = triton_device
    indices = torch.tensor(REPEATED, device=device).repeat_interleave(2)[::2]
    rows = row_order(indices, 4)
    strided = RowOrder(*(x.repeat_interleave(2)[::2] for x in vars(rows).values()))
    for x, grad in (
        (torch.randn(3, 4, device=device).t(), torch.randn(3, 6, device=device).t()),
        (torch.randn(8, 6, device=device)[::2, ::2], torch.randn(6, 9, device=device)[:, 2::3]),
        (torch.randn(4, 3, 2, device=device).transpose(1, 2), torch.randn(2, 3, 6, device=device).permute(2, 1, 0)),
        (torch.randn(1, 3, device=device).expand(4, 3), torch.randn(3, device=device).expand(6, 3)),
    ):
        assert not any(t.is_contiguous() for t in (x, grad, strided.indices, strided.order, strided.starts))
        assert_both_match(strided, x, grad)


@pytest.mark.parametrize("op", [gather_rows, sum_rows])
def test_wrong_number_of_rows(triton_device: torch.device, op) -> None:
    with pytest.raises(ValueError, match=r"_rows: x must have [46] rows, got shape \(5, 2\)"):
        op(torch.zeros(5, 2, device=triton_device), repeated(triton_device))
