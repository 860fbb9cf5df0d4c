"""A bar for what only float32 can show: the noise of two ordinary runs, measured in the same test.

Exactness belongs to float64 (`float64_arithmetic`, `float64_throughout`). Where a test has to compute in float32, no
number is a bar for every processor: each has instructions and libraries of its own, which add in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from radixtrain.verification.report import TENSOR_FACTOR

__all__ = ["assert_within_noise"]


def assert_within_noise(found: Any, ordinary: Any, again: Any, what: str = "") -> None:
    """Assert that `found` is about as close to an ordinary run as another ordinary run is.

    found, ordinary, again: numbers, sequences of them or tensors of one shape. `again` is as ordinary as `ordinary`,
    and adds in another order: another attention of Hugging Face, rows in another order, each row alone.

    The bar is TENSOR_FACTOR, 10, times the L2 distance of the two ordinary ones, plus two roundings of float32: one
    sample of the noise may be small by luck, also of numbers that happen to be equal. A NaN fails.
    """
    one, other, third = (_array(values) for values in (found, ordinary, again))
    assert one.shape == other.shape == third.shape, (one.shape, other.shape, third.shape)
    error, noise, size = (float(np.linalg.norm(x)) for x in (one - other, third - other, other))
    bar = TENSOR_FACTOR * noise + float(torch.finfo(torch.float32).eps) * size
    assert error <= bar < float("inf"), f"{what} differ by {error:.3g}, two ordinary runs by {noise:.3g}: bar {bar:.3g}"


def _array(values: Any) -> np.ndarray:
    values = values.detach().double().cpu() if isinstance(values, torch.Tensor) else values
    return np.asarray(values, dtype=np.float64)
