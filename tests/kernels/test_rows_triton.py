"""T packed tokens, U unique rows. `triton_device` is the device of Triton's kernels."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_gather_literally(triton_device: torch.device) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=triton_device)
    out = gather_rows(x, row_order(torch.tensor([2, 0, 2], device=triton_device), 3))
    assert out.tolist() == [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]


def test_sum_literally(triton_device: torch.device) -> None:
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], device=triton_device)
    rows = row_order(torch.tensor([2, 0, 2], device=triton_device), 4)
    assert sum_rows(x, rows).tolist() == [[2.0, 20.0], [0.0, 0.0], [4.0, 40.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_index_dtypes(triton_device: torch.device, dtype: torch.dtype) -> None:
    x, grad = (torch.randn(n, 3, dtype=torch.float64, device=triton_device) for n in (4, 6))
    assert_both_match(repeated(triton_device, dtype), x, grad)


@pytest.mark.parametrize(("op", "num_rows"), [(gather_rows, 4), (sum_rows, 6)])
def test_no_gradient_is_lost_in_silence(triton_device: torch.device, op: Callable[..., Tensor], num_rows: int) -> None:
    """The autograd functions of `rows.py` call them; through a direct call autograd raises."""
    out = op(torch.randn(num_rows, 3, device=triton_device, requires_grad=True), repeated(triton_device))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_opcheck(triton_device: torch.device, op: str, shape: tuple[int, ...]) -> None:
    function, num_rows, names = OPS[op]
    for dtype in (torch.float64, torch.float32):
        x = torch.randn(num_rows, *shape, dtype=dtype, device=triton_device)
        torch.library.opcheck(function, (x, *(vars(repeated(triton_device))[name] for name in names)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (17, 5), (1024,), (1025,), (2049,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(triton_device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad = (torch.randn(n, *shape, device=triton_device).to(dtype) for n in (4, 6))
    assert_both_match(repeated(triton_device), x, grad)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 101])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_many_tokens(triton_device: torch.device, num_tokens: int, dtype: torch.dtype) -> None:
    """More and fewer of one row than are in flight at once; of sizes far apart, so that the order of a sum tells."""
    rows = row_order(torch.randint(0, 7, (num_tokens,)), 7).to(triton_device)
    scales = torch.logspace(-3, 3, num_tokens)[torch.randperm(num_tokens), None]
    grad = (torch.randn(num_tokens, 33) * scales).to(triton_device, dtype)
    assert_both_match(rows, torch.randn(7, 33, device=triton_device).to(dtype), grad)


@pytest.mark.parametrize(("dtype", "sticks_at", "num"), [(torch.bfloat16, 256, 300), (torch.float16, 2048, 3000)])
def test_many_duplicates_add_up_in_float32(
    triton_device: torch.device, dtype: torch.dtype, sticks_at: int, num: int
) -> None:
    ones, zeros = torch.ones(num, 1, dtype=dtype, device=triton_device), torch.zeros(num, dtype=torch.int64)
    total = sum_rows(ones, row_order(zeros, 1).to(triton_device))
    assert total.item() == torch.tensor(float(num)).to(dtype).item()
    assert torch.zeros(1, dtype=dtype).index_add_(0, zeros, ones[:, 0].cpu()).item() == sticks_at


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


@pytest.mark.parametrize("shape", [(4, 3), (0, 3), (4, 0), (4,)])
def test_nothing_to_gather(triton_device: torch.device, shape: tuple[int, ...]) -> None:
    rows = row_order(torch.zeros(0, dtype=torch.int64, device=triton_device), shape[0])
    x = torch.randn(*shape, device=triton_device)
    out = gather_rows(x, rows)
    assert out.shape == (0, *shape[1:])
    assert torch.equal(sum_rows(out, rows), torch.zeros_like(x))


@pytest.mark.parametrize("op", [gather_rows, sum_rows])
def test_wrong_number_of_rows(triton_device: torch.device, op) -> None:
    with pytest.raises(ValueError, match=r"_rows: x must have [46] rows, got shape \(5, 2\)"):
        op(torch.zeros(5, 2, device=triton_device), repeated(triton_device))


def test_generated_indices_add_exactly(triton_device: torch.device) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(indices=st.lists(st.integers(0, 5), max_size=14), columns=st.integers(1, 5))
    def one(indices: list[int], columns: int) -> None:
        rows = row_order(torch.tensor(indices, dtype=torch.int64), 6).to(triton_device)
        x, grad = (torch.randint(-8, 8, (n, columns), device=triton_device).bfloat16() for n in (6, len(indices)))
        assert_both_match(rows, x, grad)
        exact = torch.zeros(6, columns, dtype=torch.int64).index_add_(0, rows.indices.cpu(), grad.cpu().long())
        assert torch.equal(sum_rows(grad, rows).cpu().long(), exact)

    one()


def test_same_bits_every_time(triton_device: torch.device) -> None:
    rows = row_order(torch.randint(0, 5, (60,)), 5).to(triton_device)
    x = torch.randn(60, 40, device=triton_device)
    first = sum_rows(x, rows)
    assert all(torch.equal(sum_rows(x, rows), first) for _ in range(5))


def test_without_triton_the_error_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['triton'] = None\nimport radixtrain.kernels.rows_triton"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: " in done.stderr and "pip install triton" in done.stderr
