"""T packed tokens, U unique rows."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from radixtrain.kernels.rows import gather_rows, sum_rows

REPEATED = [2, 0, 2, 1, 2, 0]  # of four rows: one three times, one twice, one once, one never


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_poison_reaches_fresh_memory() -> None:
    fresh = torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(3).new_empty(3)
    assert all(x.isnan().all() for x in fresh)
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_gradients_with_repeated_indices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    indices = torch.tensor(REPEATED, dtype=dtype)
    assert gradcheck(gather_rows, (leaf(*shape), indices))
    assert gradgradcheck(gather_rows, (leaf(*shape), indices))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matches_plain_indexing(dtype: torch.dtype) -> None:
    """Small integers, so that every dtype adds them exactly."""
    x, indices = torch.randint(-4, 5, (4, 3)).to(dtype), torch.tensor(REPEATED)
    grad = torch.randint(-4, 5, (6, 3)).to(dtype)
    plain, ours = (x.clone().requires_grad_() for _ in range(2))
    plain[indices].backward(grad)
    out = gather_rows(ours, indices)
    out.backward(grad)
    assert out.dtype == ours.grad.dtype == dtype
    assert torch.equal(out, x[indices])
    assert torch.equal(ours.grad, plain.grad)


def test_non_contiguous_rows_indices_and_gradient() -> None:
    x = leaf(3, 4).t()
    indices = torch.tensor(REPEATED).repeat_interleave(2)[::2]
    grad = torch.randn(3, 6, dtype=torch.float64).t()
    assert not any(t.is_contiguous() for t in (x, indices, grad))
    assert torch.equal(gather_rows(x, indices), x[indices])
    (ours,) = torch.autograd.grad(gather_rows(x, indices), x, grad)
    (contiguous,) = torch.autograd.grad(gather_rows(x, indices), x, grad.contiguous())
    assert torch.allclose(ours, contiguous, rtol=0, atol=1e-12)
    assert gradcheck(lambda leaf_3: gather_rows(leaf_3.t(), indices), (leaf(3, 4),))


def test_no_indices() -> None:
    x, none = leaf(4, 3), torch.zeros(0, dtype=torch.int64)
    out = gather_rows(x, none)
    assert out.shape == (0, 3)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_no_rows() -> None:
    x, none = leaf(0, 3), torch.zeros(0, dtype=torch.int64)
    gather_rows(x, none).sum().backward()
    assert x.grad.shape == (0, 3)
    assert sum_rows(torch.zeros(0, 3), none, 0).shape == (0, 3)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 2, 3)])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("dtype", "sticks_at", "num"), [(torch.bfloat16, 256, 300), (torch.float16, 2048, 3000)])
def test_many_duplicates_add_up_in_float32(
    shape: tuple[int, ...], index_dtype: torch.dtype, dtype: torch.dtype, sticks_at: int, num: int
) -> None:
    """torch 2.13 itself adds 16-bit rows in float32 for some shapes and indices; these are of both kinds."""
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    gather_rows(x, torch.zeros(num, dtype=index_dtype)).backward(torch.ones(num, *shape[1:], dtype=dtype))
    assert torch.equal(x.grad, torch.full(shape, num, dtype=dtype))
    stuck = torch.zeros(1, dtype=dtype).index_add_(0, torch.zeros(num, dtype=torch.int64), torch.ones(num, dtype=dtype))
    assert stuck.item() == sticks_at


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("num", [301, 303, 511])
def test_sum_is_rounded_once(num: int, shape: tuple[int, ...]) -> None:
    total = sum_rows(torch.ones(num, *shape, dtype=torch.bfloat16), torch.zeros(num, dtype=torch.int64), 1)
    assert total.item() == torch.tensor(float(num)).to(torch.bfloat16).item()


def test_same_bits_every_time(two_threads: None) -> None:
    x, indices = torch.randn(2000, 32), torch.randint(0, 50, (2000,))
    first = sum_rows(x, indices, 50)
    assert all(torch.equal(sum_rows(x, indices, 50), first) for _ in range(10))
