"""Helpers for tests, of this library and of its users: generated tries, forced forks, and bars for rounding errors.

An error is measured against a float64 truth. Its bar follows from the error of an ordinary implementation in the same
dtype, so it is derived, not tuned. `assert_within_reference_error` is for tensors, `assert_equivalent` for the report
of `radixtrain.verify_equivalence` on a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radixtrain.tree import runs

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from radixtrain.verification.equivalence import EquivalenceReport
    from radixtrain.verification.oracle import Features

# A sequence that gives every parameter of a small model a gradient: if every query sees one key, q and k have none.
ALIVE = [1, 0, 1, 1, 0, 0, 1, 0]


@contextmanager
def free_forks() -> Iterator[None]:
    """Let recurrent layers fork at nearly every branch, in rows of any length."""
    before, runs.MIN_SAVED = runs.MIN_SAVED, runs.SHORTEST_FORK
    try:
        yield
    finally:
        runs.MIN_SAVED = before


def ragged_batches(
    *, min_sequences: int = 1, max_sequences: int = 8, max_length: int = 10, vocab_size: int = 4, min_length: int = 1
) -> SearchStrategy[list[list[int]]]:
    """Return a hypothesis strategy for batches of token sequences that share prefixes in every possible way.

    Each sequence after the first is new, or a copy, a prefix, an extension or a fork of an earlier one. So the batches
    hold nested, identical and unrelated sequences, prefixes of others, single tokens and, with `min_length` 0, empty
    sequences, in any order.

    vocab_size: token ids are 0 ... vocab_size - 1. The default is small, so that unrelated sequences share by chance.
    min_length, max_length: tokens of a sequence.
    """
    from hypothesis import strategies as st

    tokens = st.integers(0, vocab_size - 1)
    kinds = ["fork", "fork", "fork", "extension", "prefix", "copy", "new"]

    @st.composite
    def batches(draw: Any) -> list[list[int]]:
        sequences: list[list[int]] = []
        for _ in range(draw(st.integers(min_sequences, max_sequences))):
            kind = draw(st.sampled_from(kinds if any(sequences) else ["new"]))
            if kind == "new":
                sequences.append(draw(st.lists(tokens, min_size=min_length, max_size=max_length)))
                continue
            sequence = draw(st.sampled_from([sequence for sequence in sequences if sequence]))
            place = draw(st.integers(min_length, len(sequence))) if kind in ("fork", "prefix") else len(sequence)
            tail = draw(st.lists(tokens, min_size=1, max_size=4)) if kind in ("fork", "extension") else []
            if kind == "fork" and place < len(sequence) and vocab_size > 1:
                tail[0] = (sequence[place] + 1 + tail[0] % (vocab_size - 1)) % vocab_size  # not the token there
            sequences.append([*sequence[:place], *tail][:max_length])
        return draw(st.permutations(sequences))

    return batches()


def labelled_features(**options: Any) -> SearchStrategy[Features]:
    """Return a hypothesis strategy for features of a `RadixCollator`: `ragged_batches` with labels and positions.

    Labels are anywhere: on shared tokens, different in two copies, or missing in a whole sequence. Half of the batches
    have `position_ids`: with an offset, with jumps, and different ones for equal tokens. One more sequence has a label
    on every token, so that no gradient of a small model is zero.

    options: as for `ragged_batches`.
    """
    from hypothesis import strategies as st

    @st.composite
    def features(draw: Any) -> Features:
        sequences = draw(ragged_batches(**options))
        steps = st.lists(st.integers(1, 3), min_size=options.get("max_length", 10), max_size=40)
        places = [[draw(st.integers(0, 5)), *draw(steps)] for _ in range(2)] if draw(st.booleans()) else []
        made: list[dict[str, list[int]]] = [{"input_ids": ALIVE, "labels": ALIVE}]
        for ids in sequences:
            bears_loss = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            feature = {"input_ids": ids, "labels": [t if b else -100 for t, b in zip(ids, bears_loss, strict=True)]}
            if places:
                feature["position_ids"] = list(accumulate(draw(st.sampled_from(places))[: len(ids)]))
            made.append(feature)
        return made

    return features()


def assert_equivalent(report: EquivalenceReport) -> None:
    """Assert that a report passed and that no true gradient is zero. The message is the report's table."""
    assert report.passed and report.conclusive, str(report)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Return `||actual - truth|| / ||truth||` in L2 over all elements, computed in float64.

    If the truth is all zero: 0.0 if actual is all zero too, else inf. A NaN anywhere gives inf, which passes no bar; a
    NaN would be dropped by `max` beside a number.
    """
    error, scale = _distance("actual", actual, truth), float(truth.detach().double().norm())
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / scale if math.isfinite(error / scale) else float("inf")


def assert_within_reference_error(
    actual: Tensor | Sequence[Tensor],
    reference: Tensor | Sequence[Tensor],
    truth: Tensor | Sequence[Tensor],
    factor: float = 2.0,
    names: str | Sequence[str] = (),
) -> None:
    """Assert that `actual` is about as close to `truth` as `reference` is, for each tensor separately.

    actual: the result under test, in its own dtype.
    reference: the same result, computed in the ordinary way, in the same dtype.
    truth: the same result in float64, from the same input numbers.
    factor: how many times the error of the reference is allowed.
    names: one for each tensor, for the message.

    The bar, with u the unit roundoff of the dtype (half of `finfo.eps`) and norms over all elements:

        ||actual - truth|| <= factor * ||reference - truth|| + u * ||truth||

    Derivation. Both evaluate one formula, in two orders of operations. Their errors have the same a-priori bound and
    differ by luck, so the reference's error says how hard these inputs are in this dtype; a factor of 2 is one bit for
    luck. The second term is the cost of storing the exact result, at most u of each element: no implementation can do
    better, and without it none could match a reference that happens to be exact. So the reference must be the same
    formula (`exp(s - lse)` has another bound than a softmax that divides), and the tensors large enough for luck to
    average out.

    Raises AssertionError that names the tensor, its error and the bar, and the worst element with its index and values.
    A NaN or an infinity fails, whether in actual, in reference or in truth.
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
                f"{bar / unit:.3g}, which is {factor} x the reference's {reference_error / unit:.3g} + one rounding; "
                + _worst_element(one, other, exact)
            )


def flash_attention_by_the_book(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute out, lse, dq, dk, dv as flash-attention does: the ordinary reference for attention in any dtype.

    q, dout: (T, N, H); k, v: (J, K, H); mask: (T, J), bool, True for a key that a query sees, at least one for every
    query. Operands and results of the products are in the dtype of q; everything between, and lse (N, T), is float32 or
    wider. Source: FlashAttention-2 (algorithms 1 and 2), without the tiles.
    """
    wide, groups = torch.promote_types(q.dtype, torch.float32), (k.shape[1], q.shape[1] // k.shape[1])

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(wide)

    q_TKGH, dout_TKGH = (x.to(wide).unflatten(1, groups) for x in (q, dout))
    k_JKH, v_JKH = k.to(wide), v.to(wide)
    scores = torch.einsum("tkgh,jkh->kgtj", q_TKGH, k_JKH) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse[..., None])
    out_TKGH = rounded(torch.einsum("kgtj,jkh->tkgh", rounded(p), v_JKH))
    delta = torch.einsum("tkgh,tkgh->kgt", dout_TKGH, out_TKGH)
    ds = rounded(p * (torch.einsum("tkgh,jkh->kgtj", dout_TKGH, v_JKH) - delta[..., None]))
    dq = torch.einsum("kgtj,jkh->tkgh", ds, k_JKH).flatten(1, 2) * scale
    dk = torch.einsum("kgtj,tkgh->jkh", ds, q_TKGH) * scale
    dv = torch.einsum("kgtj,tkgh->jkh", rounded(p), dout_TKGH)
    return out_TKGH.flatten(1, 2).to(q.dtype), lse.flatten(0, 1), dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _distance(name: str, one: Tensor, truth: Tensor) -> float:
    assert one.shape == truth.shape, f"{name}: shape {tuple(one.shape)}, the truth's is {tuple(truth.shape)}"
    return float((one.detach().double() - truth.detach().double()).norm())


def _worst_element(actual: Tensor, reference: Tensor, truth: Tensor) -> str:
    errors = (actual.detach().double() - truth.detach()).abs().masked_fill(~reference.isfinite(), float("inf"))
    errors = errors.nan_to_num(nan=float("inf"))
    index = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    values = (float(x[index]) for x in (actual, reference, truth))
    return "worst element at {}: actual {:.9g}, reference {:.9g}, truth {:.9g}".format(index, *values)
