"""Allocations whose size is known are counted to the byte."""

import torch

from radixtrain.timing import peak_bytes

CPU = torch.device("cpu")
KIBIBYTE = 256  # float32 numbers


def test_the_peak_is_the_highest_point_and_not_the_sum() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(100 * KIBIBYTE)
        second = torch.empty(50 * KIBIBYTE)
        del first
        third = torch.empty(20 * KIBIBYTE)  # 70 KiB now, 150 before
        del second
        return third

    assert peak_bytes(run, CPU) == 150 * 1024


def test_what_was_allocated_before_does_not_count() -> None:
    before = torch.ones(1000 * KIBIBYTE)
    assert peak_bytes(before.neg, CPU) == 1000 * 1024


def test_buffers_inside_an_operator_count() -> None:
    """Attention on the CPU holds some of its scores at a time: more than it returns."""
    q = torch.randn(1, 1, 512, 8)

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(512, 1))

    assert peak_bytes(run, CPU) > 2 * q.nbytes
