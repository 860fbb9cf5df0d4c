"""What the tests of this library and of its users share: generated ragged batches, and bars for rounding errors.

An error is measured against a float64 truth, and its bar is the error of an ordinary implementation in the same dtype:
derived, not tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["assert_within_reference_error", "ragged_batches", "relative_error"]


def ragged_batches(
    *, min_sequences: int = 1, max_sequences: int = 8, max_length: int = 10, vocab_size: int = 4, min_length: int = 1
) -> SearchStrategy[list[list[int]]]:
    """A hypothesis strategy for batches of token sequences that share prefixes in every way there is.

    Each sequence after the first is new, or a copy of an earlier one, or a prefix of it, or an extension of it, or
    forks from it somewhere. So the batches hold nested, identical and unrelated sequences, one a prefix of another,
    single tokens and, with `min_length` 0, empty sequences, in any order.

    vocab_size: token ids are 0 ... vocab_size - 1. The default is small, so that unrelated sequences meet by chance.
    min_length, max_length: tokens of a sequence.
    """
    from hypothesis import strategies as st

    tokens = st.integers(0, vocab_size - 1)
    tails = st.lists(tokens, max_size=max_length)

    @st.composite
    def batches(draw: Any) -> list[list[int]]:
        sequences: list[list[int]] = []
        for _ in range(draw(st.integers(min_sequences, max_sequences))):
            kind = draw(st.sampled_from(["new", "copy", "prefix", "extension", "fork"] if sequences else ["new"]))
            earlier = draw(st.sampled_from(sequences)) if kind != "new" else []
            shared = draw(st.integers(0, len(earlier))) if kind in ("prefix", "fork") else len(earlier)
            tail = draw(tails) if kind in ("new", "extension", "fork") else []
            sequence = [*earlier[:shared], *tail][:max_length]
            missing = max(0, min_length - len(sequence))
            sequences.append(sequence + draw(st.lists(tokens, min_size=missing, max_size=missing)))
        return draw(st.permutations(sequences))

    return batches()


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """`||actual - truth|| / ||truth||` in L2 over all elements, computed in float64.

    Where the truth is all zero: 0.0 if actual is all zero too, else inf. A NaN anywhere gives NaN, which passes no bar.
    """
    error, scale = _distance("actual", actual, truth), float(truth.detach().double().norm())
    if scale == 0.0:
        return 0.0 if error == 0.0 else error * float("inf")
    return error / scale


def assert_within_reference_error(
    actual: Tensor | Sequence[Tensor],
    reference: Tensor | Sequence[Tensor],
    truth: Tensor | Sequence[Tensor],
    factor: float = 2.0,
    names: str | Sequence[str] = (),
) -> None:
    """Assert that `actual` is about as near to `truth` as `reference` is, for each tensor on its own.

    actual: the result under test, in its own dtype.
    reference: the same result by the ordinary way of computing it, in the same dtype.
    truth: the same result in float64, from the very numbers that the other two were given.
    factor: how many times the error of the reference is allowed.
    names: one for each tensor, for the message.

    The bar, with u the unit roundoff of the dtype (half of `finfo.eps`) and norms over all elements:

        ||actual - truth|| <= factor * ||reference - truth|| + u * ||truth||

    Derivation. Both are roundings of one real result along two orders of operations. The errors share one a-priori
    bound and differ in luck, so the reference's own error says how hard these inputs are in this dtype; a factor of 2
    is one bit for the luck. The second term is what storing the exact result costs, at most u of each element: no
    implementation can be asked for less, and without it a reference that happens to be exact could not be met.

    Raises AssertionError that names the tensor, its error and the bar, and the worst element with its index and values.
    A NaN or an infinity fails, be it in actual, in reference or in truth.
    """
    actual, reference, truth = ([x] if isinstance(x, Tensor) else list(x) for x in (actual, reference, truth))
    names = [names] if isinstance(names, str) else list(names) or [f"tensor {i}" for i in range(len(actual))]
    sizes = [len(actual), len(reference), len(truth), len(names)]
    assert len(set(sizes)) == 1, "as many actual as reference, truth and names, got {}, {}, {} and {}".format(*sizes)
    for name, one, other, exact in zip(names, actual, reference, truth, strict=True):
        assert one.dtype == other.dtype, f"{name}: actual is {one.dtype}, reference is {other.dtype}"
        assert exact.dtype == torch.float64, f"{name}: truth must be float64, got {exact.dtype}"
        error, reference_error = _distance(name, one, exact), _distance(name, other, exact)
        scale = float(exact.detach().norm())
        bar = factor * reference_error + torch.finfo(one.dtype).eps / 2 * scale
        if not error <= bar < float("inf"):  # written so that NaN fails
            unit = scale or 1.0
            raise AssertionError(
                f"{name} ({one.dtype}, shape {tuple(one.shape)}): relative error {error / unit:.3g} is above "
                f"{bar / unit:.3g}, "
                f"which is {factor} x the reference's {reference_error / unit:.3g} + one rounding; "
                + _worst_element(one, other, exact)
            )


def _distance(name: str, one: Tensor, truth: Tensor) -> float:
    assert one.shape == truth.shape, f"{name}: shape {tuple(one.shape)}, the truth's is {tuple(truth.shape)}"
    return float((one.detach().double() - truth.detach().double()).norm())


def _worst_element(actual: Tensor, reference: Tensor, truth: Tensor) -> str:
    errors = (actual.detach().double() - truth.detach()).abs().nan_to_num(nan=float("inf"))
    index = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    values = (float(x[index]) for x in (actual, reference, truth))
    return "worst element at {}: actual {:.9g}, reference {:.9g}, truth {:.9g}".format(index, *values)
