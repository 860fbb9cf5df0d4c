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


TRUTH = 2.0 ** torch.arange(12, dtype=torch.float64).view(3, 4)  # float32 holds these and small multiples of UNIT more
ZEROS, NOISE, ONES = torch.zeros(4, dtype=torch.float64), torch.full((4,), 1e-9), torch.ones(3)
GENERAL = torch.randn(50, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def off_by(units: float, truth: Tensor = TRUTH) -> Tensor:
    """float32, every element off by so many units of roundoff."""
    return (truth * (1 + units * UNIT)).float()


def with_one(value: float, tensor: Tensor) -> Tensor:
    found = tensor.clone()
    found[2, 1] = value
    return found


def test_relative_error() -> None:
    """In L2; a truth of zero has no relative error, NaN passes no bar, and nothing is broadcast."""
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.5 / 5
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0 == relative_error(torch.zeros(0, 3), torch.zeros(0, 3))
    assert relative_error(torch.full((3,), 1e-30), torch.zeros(3)) == float("inf")
    for truth in (torch.zeros(2), torch.ones(2)):
        assert relative_error(torch.tensor([1.0, float("nan")]), truth) == float("inf"), "max() would drop a NaN"
    with pytest.raises(AssertionError, match=r"shape \(3,\), the truth's is \(1, 3\)"):
        relative_error(ONES, torch.ones(1, 3))


def test_what_is_within_the_bar() -> None:
    """Twice the error of the reference and one rounding, which storing the truth in any dtype may cost."""
    for actual, reference, truth, factor in (
        (off_by(16), off_by(8), TRUTH, 2.0),
        (off_by(18), off_by(8), TRUTH, 2.5),
        *((GENERAL.to(dtype), GENERAL.to(dtype), GENERAL, 0.0) for dtype in (torch.float32, torch.bfloat16)),
        (NOISE, NOISE, ZEROS, 2.0),
        (NOISE[:0], NOISE[:0], ZEROS[:0], 2.0),
    ):
        assert_within_reference_error(actual, reference, truth, factor=factor)


BEYOND = {  # what is said: actual, reference, truth, factor
    "is above": (off_by(18), off_by(8), TRUTH, 2.0),
    "is above .*, which is 1.0 x": (off_by(10), off_by(8), TRUTH, 1.0),
    "bfloat16": ((TRUTH * (1 + 2**-7)).bfloat16(), TRUTH.bfloat16(), TRUTH, 2.0),
    "the reference's 0 ": (NOISE, ZEROS.float(), ZEROS, 2.0),
    "tensor 0": ([off_by(2**23, TRUTH * 2.0**-30), off_by(0)], [off_by(0, TRUTH * 2.0**-30), off_by(0)],
                 [TRUTH * 2.0**-30, TRUTH], 2.0),  # however large the other one is
    r"tensor 0 \(torch.float32, shape \(3, 4\)\): .*\(2, 1\): actual -7.5, reference 512, truth 512": (
        with_one(-7.5, off_by(0)), off_by(0), TRUTH, 2.0),
    r"\(2, 1\): actual nan": (with_one(float("nan"), off_by(0)), off_by(0), TRUTH, 2.0),
    r"\(2, 1\): actual 512, reference inf": (off_by(0), with_one(float("inf"), off_by(0)), TRUTH, 2.0),
    r"\(2, 1\): actual 512, reference 512, truth nan": (off_by(0), off_by(0), with_one(float("nan"), TRUTH), 2.0),
    "shape": (ONES, ONES, torch.ones(1, 3).double(), 2.0),
    "reference is torch.float16": (ONES, ONES.half(), ONES.double(), 2.0),
    "must be float64": (ONES, ONES, ONES, 2.0),
    "got 1, 2, 1 and 1": ([ONES], [ONES] * 2, ONES.double(), 2.0),
}  # fmt: skip


@pytest.mark.parametrize("message", BEYOND)
def test_what_is_beyond_the_bar(message: str) -> None:
    actual, reference, truth, factor = BEYOND[message]
    with pytest.raises(AssertionError, match=message):
        assert_within_reference_error(actual, reference, truth, factor=factor)


def test_a_whole_model(tiny_qwen3) -> None:
    """Passed and every gradient alive; a feature of one repeated token leaves queries and keys without a gradient."""
    alive, dead = ([{"input_ids": ids, "labels": ids}] for ids in ([1, 0, 1, 1, 0, 0, 1, 0], [3, 3]))
    assert_equivalent(verify_equivalence(tiny_qwen3(), alive))
    with pytest.raises(AssertionError, match=r"zero: .*which proves little"):
        assert_equivalent(verify_equivalence(tiny_qwen3(), dead))


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
