"""The bars themselves: what passes, and what fails. Generated batches are tested by the tests that use them."""

import pytest
import torch
from torch import Tensor

from radixtrain import verify_equivalence
from radixtrain.testing import (
    assert_equivalent,
    assert_within_reference_error,
    flash_attention_by_the_book,
    relative_error,
)

UNIT = 2.0**-24  # the unit roundoff of float32


def off_by(truth: Tensor, error: float) -> Tensor:
    """float32, every element off by `error` of itself."""
    return (truth * (1 + error)).float()


@pytest.fixture
def truth() -> Tensor:
    """Powers of two, so that float32 holds them and small multiples of UNIT next to them."""
    return 2.0 ** torch.arange(12, dtype=torch.float64).view(3, 4)


def test_relative_error_literally() -> None:
    """In L2; a truth of zero has no relative error, and NaN passes no bar."""
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.5 / 5
    assert relative_error(torch.tensor(2.0).bfloat16(), torch.tensor(1.0, dtype=torch.float64)) == 1.0
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0 == relative_error(torch.zeros(0, 3), torch.zeros(0, 3))
    assert relative_error(torch.full((3,), 1e-30), torch.zeros(3)) == float("inf")
    for truth in (torch.zeros(2), torch.ones(2)):
        assert relative_error(torch.tensor([1.0, float("nan")]), truth) == float("inf"), "max() would drop a NaN"


def test_relative_error_does_not_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"shape \(3,\), the truth's is \(1, 3\)"):
        relative_error(torch.ones(3), torch.ones(1, 3))


def test_bar_is_twice_the_reference_and_one_rounding(truth: Tensor) -> None:
    reference = off_by(truth, 8 * UNIT)
    assert_within_reference_error(off_by(truth, 16 * UNIT), reference, truth)
    with pytest.raises(AssertionError):
        assert_within_reference_error(off_by(truth, 18 * UNIT), reference, truth)
    assert_within_reference_error(off_by(truth, 18 * UNIT), reference, truth, factor=2.5)
    with pytest.raises(AssertionError):
        assert_within_reference_error(off_by(truth, 10 * UNIT), reference, truth, factor=1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exact_reference_leaves_one_rounding(truth: Tensor, dtype: torch.dtype) -> None:
    """Rounding to the dtype always passes."""
    eps = torch.finfo(dtype).eps
    assert_within_reference_error(truth.to(dtype), truth.to(dtype), truth)
    with pytest.raises(AssertionError):
        assert_within_reference_error((truth * (1 + eps)).to(dtype), truth.to(dtype), truth)
    other = torch.randn(50, 20, dtype=torch.float64)
    assert_within_reference_error(other.to(dtype), other.to(dtype), other, factor=0.0)


def test_one_wrong_element_fails_and_is_named(truth: Tensor) -> None:
    wrong = truth.float()
    wrong[2, 1] = -7.5
    message = r"dk \(torch.float32, shape \(3, 4\)\): .*\(2, 1\): actual -7.5, reference 512, truth 512"
    with pytest.raises(AssertionError, match=message):
        assert_within_reference_error([truth.float(), wrong], [truth.float()] * 2, [truth] * 2, names=["dq", "dk"])


def test_each_tensor_has_its_own_bar(truth: Tensor) -> None:
    """A large error in a small tensor fails beside a large tensor that is right."""
    small, large = truth * 2.0**-30, truth * 2.0**30
    references = [small.float(), large.float()]
    with pytest.raises(AssertionError, match="tensor 0"):
        assert_within_reference_error([off_by(small, 0.5), large.float()], references, [small, large])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["actual", "reference", "truth"])
def test_what_is_not_finite_fails(truth: Tensor, value: float, place: int) -> None:
    given = [truth.float(), truth.float(), truth.clone()]
    given[place][1, 2] = value
    with pytest.raises(AssertionError, match=r"\(1, 2\)"):
        assert_within_reference_error(*given)


def test_truth_of_zero_allows_what_the_reference_has() -> None:
    zeros, noise = torch.zeros(4, dtype=torch.float64), torch.full((4,), 1e-9)
    assert_within_reference_error(noise, noise, zeros)
    assert_within_reference_error(noise[:0], noise[:0], zeros[:0])
    with pytest.raises(AssertionError):
        assert_within_reference_error(noise, zeros.float(), zeros)


@pytest.mark.parametrize(
    ("actual", "reference", "truth", "message"),
    [
        (torch.ones(3), torch.ones(3), torch.ones(1, 3).double(), "shape"),
        (torch.ones(3), torch.ones(3).half(), torch.ones(3).double(), "reference is torch.float16"),
        (torch.ones(3), torch.ones(3), torch.ones(3), "must be float64"),
        ([torch.ones(3)], [torch.ones(3)] * 2, torch.ones(3).double(), "got 1, 2, 1 and 1"),
    ],
)
def test_what_cannot_be_compared(actual, reference, truth, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_reference_error(actual, reference, truth)


def test_a_whole_model(tiny_qwen3) -> None:
    """Passed and every gradient alive; a feature of one repeated token leaves queries and keys without a gradient."""
    alive, dead = ([{"input_ids": ids, "labels": ids}] for ids in ([1, 0, 1, 1, 0, 0, 1, 0], [3, 3]))
    assert_equivalent(verify_equivalence(tiny_qwen3(), alive, precisions=["float64"]))
    with pytest.raises(AssertionError, match=r"zero: .*which proves little"):
        assert_equivalent(verify_equivalence(tiny_qwen3(), dead, precisions=["float64"]))


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_flash_attention_by_the_book_is_softmax_attention(num_groups: int) -> None:
    q, dout = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 7, num_groups, 8, dtype=torch.float64)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q_heads, k_heads, v_heads = (x.transpose(0, 1) for x in leaves)
    groups = 4 // num_groups
    scores = q_heads @ k_heads.repeat_interleave(groups, 0).mT * 0.3
    scores = scores.masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(-1) @ v_heads.repeat_interleave(groups, 0)).transpose(0, 1)
    out, lse, *grads = flash_attention_by_the_book(q, k, v, dout, mask, 0.3)
    truth = [expected, scores.logsumexp(-1), *torch.autograd.grad(expected, leaves, dout)]
    assert max(relative_error(x, y) for x, y in zip([out, lse, *grads], truth, strict=True)) <= 1e-12
