"""One model, untouched and with `share_prefixes`: the same loss and the same gradient, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixtrain import share_prefixes, sharing_report
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import Gradients, float64_throughout, gradients_of

__all__ = ["BAR", "assert_same", "assert_same_gradient"]

BAR = 1e-12


def assert_same_gradient(
    model: Any, loss_of: Callable[[Any], Tensor], share: Callable[[Any], Any] = share_prefixes
) -> SharingReport:
    """Assert that `loss_of(model)` and its gradient are the same before and after `share(model)`.

    The report counts the calls of the second loss, and of the first one if `share` had been called before.
    """
    with float64_throughout(model):
        expected = gradients_of(model, lambda: [loss_of(model)])
        found = gradients_of(share(model), lambda: [loss_of(model)])
    assert_same(found, expected)
    return sharing_report(model)


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert abs(found.loss - expected.loss) <= BAR * abs(expected.loss)
    assert found.tensors.keys() == expected.tensors.keys()
    whole = [torch.cat([each.flatten() for each in arm.tensors.values()]) for arm in (found, expected)]
    assert relative_error(*whole) <= BAR
