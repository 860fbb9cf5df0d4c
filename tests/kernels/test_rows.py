"""Rows that are gathered and added up: T packed tokens, U unique rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from radixtrain.kernels.rows import gather_rows, sum_rows

REPEATED = [2, 0, 2, 1, 2, 0]  # of four rows: one three times, one twice, one once, one never


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_poison_reaches_fresh_memory() -> None:
    fresh = torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(3).new_empty(3)
    assert all(x.isnan().all() for x in fresh)
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_gradients_with_repeated_indices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """From contiguous and from strided rows."""
    indices = torch.tensor(REPEATED, dtype=dtype).repeat_interleave(2)[::2]
    for view in (
        lambda x: x,
        lambda x: x.expand(2, *x.shape)[1],
        lambda x: x.t().contiguous().t() if x.ndim == 2 else x,
    ):
        assert gradcheck(lambda x, view=view: gather_rows(view(x), indices), (leaf(*shape),))
        assert gradgradcheck(lambda x, view=view: gather_rows(view(x), indices), (leaf(*shape),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "places"), [(4, REPEATED), (4, []), (0, [])], ids=["repeated", "no indices", "no rows"]
)
def test_is_plain_indexing(dtype: torch.dtype, num_rows: int, places: list[int]) -> None:
    """Small integers, so that every dtype adds them exactly; rows and gradients in other strides."""
    x, indices = torch.randint(-4, 5, (3, num_rows)).to(dtype).t(), torch.tensor(places, dtype=torch.int64)
    grad = torch.randint(-4, 5, (3, len(places))).to(dtype).t()
    plain, ours = (x.detach().requires_grad_() for _ in range(2))
    plain[indices].backward(grad)
    out = gather_rows(ours, indices)
    out.backward(grad)
    assert out.dtype == ours.grad.dtype == dtype
    assert torch.equal(out, x[indices]) and torch.equal(ours.grad, plain.grad)
    assert torch.equal(sum_rows(grad, indices, num_rows), plain.grad)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 2, 3)])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("dtype", "sticks_at"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_many_duplicates_add_up_in_float32(
    shape: tuple[int, ...], index_dtype: torch.dtype, dtype: torch.dtype, sticks_at: int
) -> None:
    """And are rounded once. torch 2.13 itself does so for some shapes and indices; these are of both kinds."""
    for num in (sticks_at + 44, sticks_at + 45, sticks_at + 47, 2 * sticks_at - 1):
        x = torch.zeros(shape, dtype=dtype, requires_grad=True)
        gather_rows(x, torch.zeros(num, dtype=index_dtype)).backward(torch.ones(num, *shape[1:], dtype=dtype))
        assert torch.equal(x.grad, torch.full(shape, float(num)).to(dtype))
    stuck = torch.zeros(1, dtype=dtype).index_add_(0, torch.zeros(num, dtype=torch.int64), torch.ones(num, dtype=dtype))
    assert stuck.item() == sticks_at


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_same_bits_every_time(two_threads: None) -> None:
    x, indices = torch.randn(2000, 32), torch.randint(0, 50, (2000,))
    first = sum_rows(x, indices, 50)
    assert all(torch.equal(sum_rows(x, indices, 50), first) for _ in range(10))
