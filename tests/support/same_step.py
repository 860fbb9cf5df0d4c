"""The one comparator: loss and every gradient are those of the ordinary model, in float64 throughout.

Whatever a step is (a batch, micro-batches, passes, images, layers that fork), it is the terms of its loss.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from radixtrain import restore_model, share_prefixes, sharing_report
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Features, Gradients, float64_throughout, float64_truth, gradients_of
from radixtrain.verification.report import Rung

__all__ = ["BAR", "Terms", "assert_same_gradient", "same", "same_gradient", "same_step", "step_in_float64"]

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
    assert rung.worst.radix <= bar and rung.loss_error <= bar, f"{what}: {rung.worst}, loss {rung.loss_error:.1e}"
    return rung
