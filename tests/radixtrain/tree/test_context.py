"""Attention of a micro-batch onto rows of earlier ones, against one softmax over an explicit mask in float64.

U rows of the micro-batch, C of its context, N query heads, K of keys and values, H head dim.
"""

import pickle
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from answers import one_by_one
from batch_contents import as_python
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from one_softmax import assert_exact, one_softmax, random_tensors, with_gradients
from tiers import tries
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from radixtrain.attention import tree_attention
from radixtrain.collators.features import token_rows
from radixtrain.collators.passes import Span
from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.kernels.merge_attention import attention_in_pieces
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring
from radixtrain.testing import ragged_batches
from radixtrain.tree.context import ContextLayout, shared_pieces
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan

CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 4]
# A prompt on two levels: 1 2 3 4 before all, 5 6 before the first two. Each micro-batch has three rows or fewer.
NESTED = [[*PROMPT, 5, 6, 7], [*PROMPT, 5, 6, 8, 8], [*PROMPT, 9, 9], [1, 2, 7, 7, 7]]
MODIFIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 0.8},
    "window of 1": {"window": 1},
    "window of 2": {"window": 2},
    "window of 4 and sinks": {"window": 4, "sinks": True},
    "a window that does not bind": {"window": 99},
    "all": {"scale": 0.3, "softcap": 0.8, "window": 3, "sinks": True},
}


def passes_of(sequences: list[list[int]], max_tokens: int = 3, **options: Any) -> list[tuple[dict[str, Any], Tensor]]:
    """The micro-batches of a step that have a context, each with its mask.

    The mask: (U, U + C), int64. how many tokens before a query each key is, -1 if it is not seen. From the sequences
    and the schedule only: a sequence sees the context rows of its own beginning, then its own rows.
    """
    features = [{"input_ids": ids, "labels": ids} for ids in sequences]
    collator = StepCollator(max_tokens=max_tokens, share_across_micro_batches=True, **options)
    schedules = collator.shares(token_rows(features)).schedules
    if schedules is None:
        return []
    (schedule,), step = schedules, collator(features)
    kept = [[tuple(sequences[n][: place + 1]) for place in range(start, end)] for n, start, end in schedule.kept]
    spans = [[each] for each in schedule.kept]
    spans += [[Span(n, schedule.num_kept[n], len(sequences[n])) for n in group] for group in schedule.groups]
    found = []
    for batch, of_pass in zip(step.micro_batches, spans, strict=True):
        context = [row for place, start, end in batch["radix"].sources for row in kept[place][start:end]]
        num_rows = batch["input_ids"].shape[1]
        mask = torch.full((num_rows, num_rows + len(context)), -1)
        own, bounds = batch["radix"].layout.inverse_indices.tolist(), batch["radix"].cu_seqlens.tolist()
        for row in set(range(num_rows)) - set(own):  # padding sees itself and the padding before it
            first = max(own) + 1
            mask[row, first : row + 1] = torch.arange(row - first, -1, -1)
        for (n, start, end), (begin, stop) in zip(
            [x for x in of_pass if x.start < x.end], pairwise(bounds), strict=True
        ):
            ids = sequences[n]
            path = [num_rows + context.index(tuple(ids[: place + 1])) for place in range(start)] + own[begin:stop]
            assert len(path) == end
            for place in range(start, end):
                mask[path[place], path[: place + 1]] = torch.arange(place, -1, -1)
        if context:
            found.append((batch, mask))
    return found


def inputs_of(mask: Tensor, heads: tuple[int, int] = (4, 2), head_dim: int = 8) -> list[Tensor]:
    """q, k, v, dout. No loss on padding, which sees no context."""
    tensors = random_tensors((mask.shape[0], mask.shape[1]), heads=heads, head_dim=head_dim)
    tensors[3][(mask[:, len(mask) :] < 0).all(1)] = 0
    return tensors


def by_tree(layout: TreeLayout, attention: str, kernel: str, **modifiers: Any) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        (k, v), stored = split(layout, k, v)
        options = {"attention": attention, "kernel": kernel, "sinks": sinks, "stored": stored, **modifiers}
        return tree_attention(q, k, v, layout, **options)

    return attend


def split(layout: TreeLayout, *keys: Tensor) -> list[tuple[Tensor, ...]]:
    """Keys and values of the rows, and those of the context, (U + C, K, H) together."""
    return list(zip(*(x.split([layout.num_rows, len(x) - layout.num_rows]) for x in keys), strict=True))


def in_packed_pieces(layout: TreeLayout, scale: float = 8**-0.5, softcap: float | None = None) -> Any:
    """The calls of a device, by the kernels of the host."""
    with patch("radixtrain.tree.context.shared_pieces", one_by_one):
        pieces = [replace(piece, ragged=on_host(piece.ragged)) for piece in layout.packed_pieces()]
    kernel, scoring = varlen_kernel("eager", CPU), Scoring(scale, softcap, None)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        own, stored = split(layout, k, v)
        return attention_in_pieces(q, *own, pieces, kernel, scoring, sinks, stored)

    return attend


def on_host(ragged: Ragged) -> Ragged:
    """With the bounds that only the host's kernels read, from the tensors that a device's kernels read."""
    q, k = ragged.cu_seqlens_q.tolist(), ragged.cu_seqlens_k.tolist()
    bounds = tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))
    assert ragged.max_seqlen_q >= max(np.diff(q)) and ragged.max_seqlen_k >= max(np.diff(k))
    return replace(ragged, bounds=bounds)


WAYS = [(attention, kernel) for attention in ("cascade", "path", "auto") for kernel in ("torch", "eager")]


def assert_every_way_is_exact(
    batch: dict[str, Any], mask: Tensor, heads: tuple[int, int], modifiers: dict[str, Any]
) -> None:
    layout, tensors = batch["radix"].layout, inputs_of(mask, heads)
    assert layout.max_seqlen == mask.max() + 1
    binds = modifiers.get("window", layout.max_seqlen) < layout.max_seqlen
    options = {name: value for name, value in modifiers.items() if name != "sinks"}
    sinks = [torch.linspace(-1, 2, heads[0], dtype=torch.float64)] * ("sinks" in modifiers)
    truth = with_gradients(partial(one_softmax, distances=mask, **options), tensors, *sinks)
    for attention, kernel in WAYS:
        if not ((binds and attention == "cascade") or ("softcap" in modifiers and kernel == "torch")):
            found = with_gradients(by_tree(layout, attention, kernel, **options), tensors, *sinks)
            assert_exact(found, truth, (attention, kernel, modifiers))
    if "window" not in modifiers:
        found = with_gradients(in_packed_pieces(layout, **options), tensors, *sinks)
        assert_exact(found, truth, ("packed", modifiers))


@pytest.mark.parametrize("name", MODIFIERS)
def test_nested_in_float64(name: str) -> None:
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({}, (2, 2)),
        ({"pad_to_multiple_of": 3}, (4, 2)),
        ({"min_shared_tokens": 5}, (4, 1)),
    ]
    for options, heads in cases:
        found = passes_of(NESTED, **options)
        assert len(found) >= 3
        for batch, mask in found:
            assert_every_way_is_exact(batch, mask, heads, MODIFIERS[name])


def test_the_drawn_example() -> None:
    """Rows 0 and 1 are context; 2 and 3 below both, 5 and 6 below 0."""
    plan = build_prefix_plan([2, 3, 5, 6], [0, 2, 4])
    subtree_ends = np.array([7, 5, 5, 5, 5, 7, 7])
    layout = ContextLayout.of(plan, np.array([2, 3, 5, 6]), np.array([0, 1]), subtree_ends)
    assert (layout.num_rows, layout.bounds) == (2, ((0, 4, 0, 1), (0, 2, 1, 2)))
    rows = [(piece.q_rows, piece.k_rows) for piece in layout.pieces(CPU)]
    assert rows == [(slice(0, 4), slice(0, 1)), (slice(0, 2), slice(1, 2))]


@example([[3, 2, 1, 0] * 2, [3, 2, 1, 0, 3, 1]], 1, {})
@settings(max_examples=tries(150, 3_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ragged_batches(),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([{}, {"min_shared_tokens": 3}, {"pad_to_multiple_of": 2}]),
)
def test_generated_tries_in_float64(sequences: list[list[int]], max_tokens: int, options: dict[str, Any]) -> None:
    for batch, mask in passes_of(sequences, max(max_tokens, options.get("pad_to_multiple_of", 1)), **options):
        for name in ("none", "all"):
            assert_every_way_is_exact(batch, mask, (2, 1), MODIFIERS[name])


def test_round_trips() -> None:
    """Through a pickle and to a device."""
    for batch, _ in passes_of(NESTED):
        layout = batch["radix"].layout
        assert as_python(pickle.loads(pickle.dumps(layout))) == as_python(layout)
        moved = layout.to("meta")
        assert moved.context.bounds == layout.context.bounds
        assert len(moved.pieces) == 1 + len(layout.levels) + len(layout.context.bounds)


def test_another_attention_is_refused_and_other_rows_do_not_fit() -> None:
    batch, mask = passes_of(NESTED)[-1]
    layout = batch["radix"].layout
    q, k, v, _ = inputs_of(mask)
    for attention in ("expand", "reference"):
        with pytest.raises(UserError, match=f"attention='{attention}' cannot attend to rows of an earlier micro-batch"):
            by_tree(layout, attention, "auto")(q, k, v)
    with pytest.raises(ValueError, match=rf"stored must be keys and values of the {layout.context.num_rows} rows of"):
        by_tree(layout, "auto", "auto")(q, k[:-1], v[:-1])
    with pytest.raises(ValueError, match=r"stored must be .*; got \[0\]"):
        tree_attention(q, k[: len(q)], v[: len(q)], layout)


@pytest.mark.parametrize("attention", ["cascade", "path"])
def test_rows_that_are_not_finite_stay_where_they_are_seen(attention: str) -> None:
    for batch, mask in passes_of(NESTED):
        layout = batch["radix"].layout
        tensors = inputs_of(mask)
        for key in range(len(mask), mask.shape[1]):
            k, v = tensors[1].clone(), tensors[2].clone()
            k[key] = v[key] = float("nan")
            out = by_tree(layout, attention, "auto")(tensors[0], k, v)
            assert torch.equal(out.isnan().any(-1).any(-1), mask[:, key] >= 0)


class TestSharedPieces:
    """Stored rows that several queries see are as few calls as can be."""

    def pieces(self, *runs: tuple[list[int], list[int]], device: str = "cpu") -> list[tuple]:
        """Rows of queries and keys, and the bounds of the call."""
        arrays = [(np.array(rows), np.array(slots)) for rows, slots in runs]
        found = shared_pieces(arrays, torch.device(device))
        return [(piece.q_rows, piece.k_rows, piece.ragged.bounds) for piece in found]

    def test_runs_without_a_common_query_are_one_call(self) -> None:
        """Rows 0 1 and 4 5 6 with slots of their own, which the rows between them do not see."""
        found = self.pieces(([4, 5, 6], [20, 21]), ([0, 1], [30, 31, 32]))
        assert found == [(slice(0, 7), slice(20, 33), ((0, 2, 10, 13), (4, 7, 0, 2)))]

    def test_runs_with_a_common_query_are_several(self) -> None:
        """The one that most queries see first."""
        found = self.pieces(([2, 3], [7]), ([0, 1, 2, 3], [1, 2]), ([0, 1], [5, 6]))
        assert found == [
            (slice(0, 4), slice(1, 3), ((0, 4, 0, 2),)),
            (slice(0, 4), slice(5, 8), ((0, 2, 0, 2), (2, 4, 2, 3))),
        ]

    @pytest.mark.parametrize("run", [([0, 2], [7, 8]), ([0, 1], [7, 9])], ids=["rows", "slots"])
    def test_what_is_no_range_is_gathered(self, run: tuple[list[int], list[int]]) -> None:
        ((q_rows, k_rows, bounds),) = self.pieces(run)
        assert bounds == ((0, 2, 0, 2),)
        for found, expected in ((q_rows, run[0]), (k_rows, run[1])):
            assert np.arange(50)[found].tolist() == expected

    def test_a_device_takes_a_call_for_each(self) -> None:
        """Torch's meta device stands in for CUDA."""
        found = self.pieces(([4, 5, 6], [20, 21]), ([0, 1], [30, 31, 32]), device="meta")
        assert [each[:2] for each in found] == [(slice(4, 7), slice(20, 22)), (slice(0, 2), slice(30, 33))]

    @pytest.mark.parametrize("number", [1, 20])
    def test_a_device_gets_the_bounds_of_all_runs_in_one_copy(self, number: int) -> None:
        runs = [(np.arange(4), np.arange(5 * each, 5 * each + each + 1)) for each in range(number)]
        with CopiesOnTheHost() as copies:
            pieces = shared_pieces(runs, torch.device("meta"))
        assert copies.count == 1
        calls = [piece.ragged for piece in pieces]
        bounds = [(call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()) for call in calls]
        assert bounds == [([0, 4], [0, each + 1]) for each in range(number)]
        assert {call.cu_seqlens_k.dtype for call in calls} == {torch.int32}


class CopiesOnTheHost(TorchDispatchMode):
    """Copies to a device, counted, stay where their values can be read."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._to_copy.default:
            return func(*args, **(kwargs or {}))
        assert kwargs["non_blocking"], "the host waits for it"
        self.count += 1
        return args[0].clone()
