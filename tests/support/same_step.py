"""The one comparator: loss and every gradient are those of the ordinary model, in float64 throughout.

Whatever a step is (a batch, micro-batches, passes, images, layers that fork), it is the terms of its loss.

A bar for what only float32 can show: the noise of two ordinary runs, measured in the same test.

Exactness belongs to float64 (`float64_arithmetic`, `float64_throughout`). Where a test has to compute in float32, no
number is a bar for every processor: each has instructions and libraries of its own, which add in another order.

Tree attention whose keys are wrong: a mistake that a comparison has to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import radixtrain.hf.attention_interface
from radixtrain import restore_model, share_prefixes, sharing_report
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Features, Gradients, float64_throughout, float64_truth, gradients_of
from radixtrain.verification.report import TENSOR_FACTOR, Rung

BAR = 1e-12  # relative L2 of each parameter's gradient, and of the loss
Terms = Callable[[Any], Iterable[Tensor]]
"""Given a prepared model: the terms of the loss of one step, each of which goes backward by itself."""


def step_in_float64(model: Any, truth: Gradients | Features, ours: Terms, **options: Any) -> Rung:
    """The errors of a step. The model is as it came from Hugging Face afterwards.

    truth: the true gradient, or features, whose true gradient is that of each sequence by itself.
    options: of `share_prefixes`.
    """
    exact = truth if isinstance(truth, Gradients) else float64_truth(restore_model(model), truth)
    with float64_throughout(restore_model(model)):
        prepared = share_prefixes(model, **options)
        try:
            found = gradients_of(prepared, lambda: ours(prepared))
        finally:
            restore_model(model)
    return compare_gradients("float64", exact, exact, found)


def same(truth: Gradients, found: Gradients, *, what: Any = "", bar: float = BAR) -> Rung:
    """Assert that loss and every gradient of two arms are equal, and return their errors. what: for the message."""
    assert found.tensors.keys() == truth.tensors.keys(), what
    return _within(compare_gradients("float64", truth, truth, found), what, bar)


def same_gradient(model: Any, loss_of: Callable[[Any], Tensor], share: Callable[[Any], Any] = share_prefixes) -> Rung:
    """Assert that `loss_of(model)` and its gradients are the same before and after `share(model)`; return the errors.

    The report counts the calls of the second loss, and of the first one if `share` had been called before.
    """
    with float64_throughout(model):
        truth = gradients_of(model, lambda: [loss_of(model)])
        return same(truth, gradients_of(share(model), lambda: [loss_of(model)]))


def assert_same_gradient(
    model: Any, loss_of: Callable[[Any], Tensor], share: Callable[[Any], Any] = share_prefixes
) -> SharingReport:
    """Assert as `same_gradient` does, and return what was shared."""
    same_gradient(model, loss_of, share)
    return sharing_report(model)


def same_step(
    model: Any, truth: Gradients | Features, ours: Terms, *, bar: float = BAR, what: Any = "", **options: Any
) -> Rung:
    """Assert that loss and gradients are the true ones, and return their errors.

    what: for the message. The rest as for `step_in_float64`.
    """
    return _within(step_in_float64(model, truth, ours, **options), what, bar)


def _within(rung: Rung, what: Any, bar: float) -> Rung:
    assert not rung.failed, f"{what}: {rung.reason}"
    assert rung.worst.radix <= bar and rung.loss.radix <= bar, f"{what}: {rung.worst}, loss {rung.loss.radix:.1e}"
    return rung


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


def with_wrong_keys(patch: pytest.MonkeyPatch, by: float = 1e-3, forward: bool = False, above: int = 0) -> None:
    """Keys, or only their gradients, are off by this factor, in batches of more rows than `above`."""
    attend = radixtrain.hf.attention_interface.tree_attention

    def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        wrong = key * (1 + by) if forward else key + by * (key - key.detach())
        return attend(query, wrong if len(key) > above else key, value, *args, **options)

    patch.setattr(radixtrain.hf.attention_interface, "tree_attention", broken)
