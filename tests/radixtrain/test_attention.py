"""T packed tokens, U unique rows, N query heads, K key/value heads, H head dim."""

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import scaled_dot_product_attention

from radixtrain import RadixCollator, prepare_model, verify_equivalence
from radixtrain import attention as attention_module
from radixtrain.attention import (
    EVERYWHERE,
    STRATEGIES,
    AttentionChoice,
    cached_attention,
    choose_attention,
    tree_attention,
    unlogged,
)
from radixtrain.errors import UserError
from radixtrain.kernels.cached import Lanes
from radixtrain.kernels.cascade import cascade_attention
from radixtrain.kernels.looping import EagerKernel
from radixtrain.kernels.path import path_attention
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.testing import assert_within_reference_error, ragged_batches, relative_error
from radixtrain.tree.cached_layout import CachedLayout, Paths, shared_piece
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = ("out", "dq", "dk", "dv")
DEFAULT = Scoring(8**-0.5)  # of heads of 8
WAYS = [(strategy, kernel) for strategy in ("cascade", "path", "expand") for kernel in ("torch", "eager")]
ways = pytest.mark.parametrize(("attention", "kernel"), WAYS)
EVERY_WAY = [*WAYS, ("reference", "auto"), ("auto", "auto")]
every_way = pytest.mark.parametrize(("attention", "kernel"), EVERY_WAY)
# `tree` takes no float64. Triton's interpreter gets bfloat16 wrong; tests/kernels/conftest.py works around it.
TREE = [("tree", "auto")] if importlib.util.find_spec("triton") and not torch.cuda.is_available() else []
every_way_and_tree = pytest.mark.parametrize(("attention", "kernel"), [*EVERY_WAY, *TREE])
with_tree = pytest.mark.skipif(
    not TREE, reason="pip install triton runs it on the CPU; on CUDA tests/kernels/test_cuda.py"
)

# Two trees: one of three levels below [1, 1, 2], one of one level below [2]; a prefix of another; one twice.
NESTED = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 2, 2], [2, 1, 1], [2, 3, 3], [2, 1, 1], [5]]


def plan_of(sequences: list[list[int]], **options) -> PrefixPlan:
    tokens = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(tokens, np.cumsum([0, *map(len, sequences)]), **options)


def longer(sequences: list[list[int]], times: int) -> list[list[int]]:
    """The same tree with every run `times` as long."""
    return [[token for token in sequence for _ in range(times)] for sequence in sequences]


def inputs(
    plan: PrefixPlan, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), head_dim: int = 8, seed: int = 0
) -> list[Tensor]:
    """q, k, v, dout. No loss on padding, whose output means nothing."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(plan.num_rows, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    tensors[3][plan.num_unique_tokens :] = 0
    return tensors


def with_gradients(attend, plan: PrefixPlan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out of the unique tokens, dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach()[: plan.num_unique_tokens], *torch.autograd.grad(out, leaves, dout)]


def by_tree(plan: PrefixPlan, tensors: list[Tensor], attention: str, kernel: str = "auto", **options) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(q, k, v, plan, attention=attention, kernel=kernel, **options)

    return with_gradients(attend, plan, *tensors)


def each_by_itself(plan: PrefixPlan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """What a user has today: torch's attention on each sequence by itself; gradients of copies add up in float64."""
    rows = torch.tensor(plan.inverse_indices)
    first = torch.tensor(plan.gather_indices[: plan.num_unique_tokens])
    leaves = [x[rows].requires_grad_() for x in (q, k, v)]
    dout_packed = dout.new_zeros(len(rows), *dout.shape[1:])
    dout_packed[first] = dout[: plan.num_unique_tokens]
    lengths = np.diff(plan.cu_seqlens).tolist()
    outs = []
    for parts in zip(*(x.split(lengths) for x in leaves), strict=True):
        heads_first = [x.transpose(0, 1)[None] for x in parts]
        out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs)
    copies = torch.autograd.grad(out, leaves, dout_packed)
    totals = [
        torch.zeros(x.shape, dtype=torch.float64).index_add_(0, rows, g.double())
        for x, g in zip((q, k, v), copies, strict=True)
    ]
    return [out.detach()[first], *(total.to(q.dtype) for total in totals)]


def assert_equal_in_float64(actual: list[Tensor], truth: list[Tensor]) -> None:
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, actual, truth, strict=True)}
    assert all(error <= 1e-12 for error in errors.values()), errors


@every_way
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"min_shared_tokens": 3}, {"pad_to_multiple_of": 16}], ids=str)
def test_nested_in_float64(attention: str, kernel: str, heads: tuple[int, int], options: dict) -> None:
    plan = plan_of(longer(NESTED, 2), **options)
    tensors = inputs(plan, torch.float64, heads)
    actual = by_tree(plan, tensors, attention, kernel)
    assert_equal_in_float64(actual, by_tree(plan, tensors, "reference"))
    assert_equal_in_float64(actual, each_by_itself(plan, *tensors))


@pytest.mark.parametrize("min_shared_tokens", [1, 3])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sequences=ragged_batches(min_length=0), pad_to_multiple_of=st.sampled_from([None, 8]))
def test_generated_in_float64(
    min_shared_tokens: int, sequences: list[list[int]], pad_to_multiple_of: int | None
) -> None:
    sequences = [*sequences, [0, 1]]  # a query with one key has gradient zero: some must have two
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    tensors = inputs(plan, torch.float64, (2, 1), 4)
    truth = by_tree(plan, tensors, "reference")
    assert_equal_in_float64(each_by_itself(plan, *tensors), truth)
    for attention, kernel in WAYS:
        assert_equal_in_float64(by_tree(plan, tensors, attention, kernel), truth)


LOWER = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize(
    ("attention", "kernel", "dtype"),
    [
        pytest.param(*way, dtype, id=f"{way[0]}-{way[1]}-{name}")
        for name, dtype in LOWER.items()
        for way in [*EVERY_WAY, *(TREE if name != "bfloat16" else [])]
    ],
)
@pytest.mark.parametrize("options", [{}, {"min_shared_tokens": 20, "pad_to_multiple_of": 64}], ids=str)
def test_lower_precision(attention: str, kernel: str, dtype: torch.dtype, options: dict) -> None:
    plan = plan_of(longer(NESTED, 10), **options)
    tensors = inputs(plan, dtype, head_dim=16)
    truth = by_tree(plan, [x.double() for x in tensors], "reference")
    actual = by_tree(plan, tensors, attention, kernel)
    assert [x.dtype for x in actual] == [dtype] * 4
    assert_within_reference_error(actual, each_by_itself(plan, *tensors), truth, names=NAMES)


@every_way
def test_single_tokens_see_themselves(attention: str, kernel: str) -> None:
    plan = plan_of([[1], [2], [1], [3]])
    tensors = inputs(plan, torch.float64, (2, 2))
    out, dq, dk, dv = by_tree(plan, tensors, attention, kernel)
    assert torch.equal(out, tensors[2])
    assert relative_error(dv, tensors[3]) <= 1e-15
    assert max(dq.abs().max(), dk.abs().max()) <= 1e-14  # softmax of one score: zero, but for the rounding of delta


@every_way_and_tree
@pytest.mark.parametrize("sequences", [[], [[], []]])
def test_no_rows(attention: str, kernel: str, sequences: list[list[int]]) -> None:
    plan = plan_of(sequences)
    results = by_tree(plan, inputs(plan, torch.float32), attention, kernel)
    assert [x.shape for x in results] == [(0, 4, 8), (0, 4, 8), (0, 2, 8), (0, 2, 8)]


@every_way
def test_gradcheck(attention: str, kernel: str) -> None:
    plan = plan_of([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3]])
    leaves = [x.requires_grad_() for x in inputs(plan, torch.float64, (2, 1), 3)[:3]]
    assert gradcheck(lambda q, k, v: tree_attention(q, k, v, plan, attention=attention, kernel=kernel), leaves)


@every_way_and_tree
def test_plan_or_layout(attention: str, kernel: str) -> None:
    plan = plan_of(NESTED)
    q, k, v, _ = inputs(plan, torch.float32)
    layout = TreeLayout.from_plan(plan)
    carried = TreeLayout.from_batch(layout.to_batch())
    tiled = TreeLayout.from_batch(TreeLayout.from_plan(plan, tiles=(32, 32)).to_batch())
    trees = plan, layout, carried, tiled
    first, *others = (tree_attention(q, k, v, tree, attention=attention, kernel=kernel) for tree in trees)
    assert all(torch.equal(first, other) for other in others)


@every_way
def test_scale(attention: str, kernel: str) -> None:
    plan = plan_of(NESTED)
    q, k, v, dout = inputs(plan, torch.float64)
    by_default = by_tree(plan, [q, k, v, dout], attention, kernel)
    assert_equal_in_float64(by_default, by_tree(plan, [q, k, v, dout], attention, kernel, scale=8**-0.5))
    out_scaled = by_tree(plan, [q * 3, k, v, dout], attention, kernel)[0]
    assert relative_error(by_tree(plan, [q, k, v, dout], attention, kernel, scale=3 * 8**-0.5)[0], out_scaled) <= 1e-12


@pytest.mark.parametrize(
    ("attention", "kernel", "dtype"),
    [*((*way, dtype) for way in EVERY_WAY for dtype in (torch.float32, torch.bfloat16))]
    + [(*way, torch.float32) for way in TREE],
)
def test_branches_do_not_see_each_other(attention: str, kernel: str, dtype: torch.dtype) -> None:
    """Other tokens in one branch leave every output outside of it bit-equal."""
    plan = plan_of(longer(NESTED, 3))
    tensors = inputs(plan, dtype)
    others = inputs(plan, dtype, seed=1)
    before = by_tree(plan, tensors, attention, kernel)[0]
    for start, end in zip(plan.segment_starts.tolist(), plan.subtree_ends.tolist(), strict=False):
        changed = [x.clone() for x in tensors]
        for x, y in zip(changed[:3], others[:3], strict=True):
            x[start:end] = y[start:end]
        after = by_tree(plan, changed, attention, kernel)[0]
        assert torch.equal(after[:start], before[:start]) and torch.equal(after[end:], before[end:])
        assert not torch.equal(after[start:end], before[start:end])


@every_way
def test_same_bits_every_time(attention: str, kernel: str) -> None:
    plan = plan_of(longer(NESTED, 10))
    tensors = inputs(plan, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (by_tree(plan, tensors, attention, kernel) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


MODIFIERS = {
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 0.8},
    "window of 1": {"window": 1},
    "window of 2": {"window": 2},
    "window of 3": {"window": 3},
    "a window that just binds": {"window": 9},
    "a window that does not bind": {"window": 10},
    "window and sinks": {"window": 3, "sinks": True},
    "soft-cap and window": {"softcap": 0.8, "window": 3},
    "all": {"softcap": 0.8, "window": 2, "sinks": True},
}
LONGEST = 10


def modified_ways(modifiers: dict) -> list[tuple[str, str]]:
    """The strategies and kernels that compute it."""
    ways = [*WAYS, ("reference", "auto"), ("auto", "auto")]
    if modifiers.get("window", LONGEST) < LONGEST:
        ways = [way for way in ways if way[0] != "cascade"]
    return [way for way in ways if way[1] != "torch"] if "softcap" in modifiers else ways


modified = pytest.mark.parametrize("modifiers", MODIFIERS.values(), ids=MODIFIERS)
modified_every_way = pytest.mark.parametrize(
    ("attention", "kernel", "modifiers"),
    [
        pytest.param(*way, modifiers, id=f"{name}-{way[0]}-{way[1]}")
        for name, modifiers in MODIFIERS.items()
        for way in modified_ways(modifiers)
    ],
)


def with_sinks(modifiers: dict, num_heads: int, dtype: torch.dtype) -> dict:
    """The modifiers with one sink for each head, if they ask for sinks."""
    if not modifiers.get("sinks"):
        return modifiers
    return {**modifiers, "sinks": torch.linspace(-1, 2, num_heads, dtype=torch.float64).to(dtype)}


def modified_by_tree(
    plan: PrefixPlan, tensors: list[Tensor], attention: str, kernel: str, modifiers: dict
) -> list[Tensor]:
    """out of the unique tokens, dq, dk, dv, and dsinks if there are sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    options = with_sinks(modifiers, tensors[0].shape[1], tensors[0].dtype)
    if "sinks" in options:
        options["sinks"].requires_grad_()
        leaves.append(options["sinks"])
    out = tree_attention(*leaves[:3], plan, attention=attention, kernel=kernel, **options)
    return [out.detach()[: plan.num_unique_tokens], *torch.autograd.grad(out, leaves, tensors[3])]


def modified_each_by_itself(plan: PrefixPlan, tensors: list[Tensor], modifiers: dict) -> list[Tensor]:
    """Each sequence by itself, with one plain softmax as in Hugging Face's eager functions. No tree, no kernel."""
    q, k, v, dout = tensors
    rows = torch.tensor(plan.inverse_indices)
    first = torch.tensor(plan.gather_indices[: plan.num_unique_tokens])
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    options = with_sinks(modifiers, q.shape[1], q.dtype)
    if "sinks" in options:
        leaves.append(options["sinks"].requires_grad_())
    packed = [x[rows].split(np.diff(plan.cu_seqlens).tolist()) for x in leaves[:3]]
    out = torch.cat([one_softmax(*parts, **options) for parts in zip(*packed, strict=True)])[first]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout[: plan.num_unique_tokens])]


def one_softmax(q: Tensor, k: Tensor, v: Tensor, *, softcap=None, window=None, sinks=None) -> Tensor:
    length, num_heads, head_dim = q.shape
    k, v = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * head_dim**-0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1)[..., :length], v)


def assert_modified_equal(actual: list[Tensor], truth: list[Tensor], modifiers: dict) -> None:
    """If a query sees only itself, dq and dk are zero but for the rounding of delta, and have no relative error."""
    names = (*NAMES, "dsinks")[: len(truth)]
    dead = ("dq", "dk") if modifiers == {"window": 1} else ()
    for name, x, y in zip(names, actual, truth, strict=True):
        error = float(x.abs().max()) / 100 if name in dead else relative_error(x, y)
        assert error <= 1e-12, f"{name}: {error:.2g}"


class TestModifiers:
    @modified
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sequences=ragged_batches(min_length=0, max_length=LONGEST), pad_to_multiple_of=st.sampled_from([None, 8]))
    def test_generated_in_float64(
        self, modifiers: dict, sequences: list[list[int]], pad_to_multiple_of: int | None
    ) -> None:
        sequences = [*sequences, [0, 1, 2] * 3 + [3]]  # one as long as can be: windows below bind
        plan = plan_of(sequences, pad_to_multiple_of=pad_to_multiple_of)
        tensors = inputs(plan, torch.float64, (2, 1), 4)
        truth = modified_each_by_itself(plan, tensors, modifiers)
        for attention, kernel in modified_ways(modifiers):
            assert_modified_equal(modified_by_tree(plan, tensors, attention, kernel, modifiers), truth, modifiers)

    @modified_every_way
    @pytest.mark.parametrize("options", [{"min_shared_tokens": 3}, {"pad_to_multiple_of": 16}], ids=str)
    def test_nested_in_float64(self, attention: str, kernel: str, modifiers: dict, options: dict) -> None:
        plan = plan_of(longer(NESTED, 2), **options)
        modifiers = {**modifiers, **({"window": 12} if modifiers == {"window": LONGEST} else {})}
        tensors = inputs(plan, torch.float64, (4, 2))
        actual = modified_by_tree(plan, tensors, attention, kernel, modifiers)
        assert_modified_equal(actual, modified_each_by_itself(plan, tensors, modifiers), modifiers)

    @modified_every_way
    def test_gradcheck(self, attention: str, kernel: str, modifiers: dict) -> None:
        plan = plan_of([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3], list(range(7, 7 + LONGEST))])
        leaves = [x.requires_grad_() for x in inputs(plan, torch.float64, (2, 1), 3)[:3]]
        options = with_sinks(modifiers, 2, torch.float64)
        sinks = [options["sinks"].requires_grad_()] if "sinks" in options else []

        def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            given = {**options, "sinks": sinks[0]} if sinks else options
            return tree_attention(q, k, v, plan, attention=attention, kernel=kernel, **given)

        assert gradcheck(attend, [*leaves, *sinks], fast_mode=True)

    @modified_every_way
    def test_bfloat16(self, attention: str, kernel: str, modifiers: dict) -> None:
        """Windows as much wider as the sequences are longer, so that there are keys enough to average out luck."""
        plan = plan_of(longer(NESTED, 10))
        modifiers = {**modifiers, **({"window": 10 * modifiers["window"]} if "window" in modifiers else {})}
        if modifiers.get("window") == 100:
            modifiers = {"window": 60}  # the longest sequence
        tensors = inputs(plan, torch.bfloat16, head_dim=16)
        truth = modified_each_by_itself(plan, [x.double() for x in tensors], modifiers)
        actual = modified_by_tree(plan, tensors, attention, kernel, modifiers)
        reference = modified_each_by_itself(plan, tensors, modifiers)
        assert [x.dtype for x in actual] == [torch.bfloat16] * len(actual)
        assert_within_reference_error(actual[:4], reference[:4], truth[:4], names=NAMES)

    def test_window_counts_tokens_not_positions(self) -> None:
        """Positions that jump, as after a dropped span, do not change who is near."""
        tokens = [1, 1, 2, 2, 3, 1, 1, 2, 2, 4]
        jumping = build_prefix_plan(tokens, [0, 5, 10], position_ids=[0, 1, 50, 51, 52] * 2)
        tensors = inputs(jumping, torch.float64)
        truth = modified_each_by_itself(jumping, tensors, {"window": 3})
        for attention in ("reference", "path", "expand"):
            assert_modified_equal(modified_by_tree(jumping, tensors, attention, "auto", {"window": 3}), truth, {})

    @pytest.mark.parametrize("attention", [*EVERYWHERE, *(name for name, _ in TREE)])
    @pytest.mark.parametrize("window", [6, 7, 1000])
    def test_window_that_does_not_bind_is_none(self, attention: str, window: int) -> None:
        plan = plan_of(NESTED)
        tensors = inputs(plan, torch.float32)
        with_window = by_tree(plan, tensors, attention, window=window)
        assert all(torch.equal(x, y) for x, y in zip(with_window, by_tree(plan, tensors, attention), strict=True))

    @pytest.mark.parametrize(
        ("right", "wrong"),
        [
            ({"window": 3}, {"window": 2}),
            ({"window": 3}, {"window": 4}),
            ({"window": 3}, {}),
            ({"softcap": 0.8}, {}),
            ({"softcap": 0.8}, {"softcap": 0.9}),
            ({"window": 3, "sinks": True}, {"window": 3}),
        ],
    )
    def test_wrong_modifiers_are_caught(self, right: dict, wrong: dict) -> None:
        plan = plan_of(longer(NESTED, 3))
        tensors = inputs(plan, torch.float64)
        truth = modified_each_by_itself(plan, tensors, right)[:4]
        for tensor, exact in zip(modified_by_tree(plan, tensors, "auto", "eager", wrong)[:4], truth, strict=True):
            assert relative_error(tensor, exact) > 1e-3

    @pytest.mark.parametrize("attention", ["path", "expand", "reference"])
    def test_branches_do_not_see_each_other(self, attention: str) -> None:
        plan = plan_of(longer(NESTED, 3))
        tensors, others = inputs(plan, torch.float32), inputs(plan, torch.float32, seed=1)
        before = modified_by_tree(plan, tensors, attention, "auto", MODIFIERS["all"])[0]
        for start, end in zip(plan.segment_starts.tolist(), plan.subtree_ends.tolist(), strict=False):
            changed = [x.clone() for x in tensors]
            for x, y in zip(changed[:3], others[:3], strict=True):
                x[start:end] = y[start:end]
            after = modified_by_tree(plan, changed, attention, "auto", MODIFIERS["all"])[0]
            assert torch.equal(after[:start], before[:start]) and torch.equal(after[end:], before[end:])

    @pytest.mark.parametrize("attention", ["cascade", "path", "expand", "reference"])
    @pytest.mark.parametrize("sequences", [[], [[], []]])
    def test_no_rows(self, attention: str, sequences: list[list[int]]) -> None:
        plan = plan_of(sequences)
        results = modified_by_tree(plan, inputs(plan, torch.float32), attention, "auto", {"sinks": True, "window": 1})
        assert [x.shape for x in results] == [(0, 4, 8), (0, 4, 8), (0, 2, 8), (0, 2, 8), (4,)]
        assert not results[-1].any()


class TopLeftKernel(EagerKernel):
    """Causal from the wrong corner: the first query sees only the first key."""

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor | float]:
        scores, slope = super()._scores(q, k, None, scoring)
        return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf")), slope


def top_left_causal(layout: TreeLayout):
    return lambda q, k, v: path_attention(q, k, v, layout.path_keys, layout.paths, TopLeftKernel(), DEFAULT)


def one_level(layout: TreeLayout):
    """The cascade of a tree of one level: only roots are seen by their descendants, deeper ancestors are not."""
    own, roots, *deeper = layout.packed_pieces()
    assert deeper
    return lambda q, k, v: cascade_attention(q, k, v, (own, roots), EagerKernel(), DEFAULT)


def sibling_leak(layout: TreeLayout):
    """One leaf is seen by the branch after it."""
    ends, starts = layout.subtree_ends.clone(), layout.segment_starts
    leaf = next(i for i in range(len(ends)) if ends[i] == starts[i + 1])
    ends[leaf] += 1
    wrong = dataclasses.replace(layout, subtree_ends=ends)
    return lambda q, k, v: reference_attention(q, k, v, tree_mask(wrong.row_subtree_ends), DEFAULT)


def plain_causal(layout: TreeLayout):
    """All unique rows as one sequence: what stock attention makes of a radix batch."""
    ends = torch.full((layout.num_rows,), layout.num_rows)
    return lambda q, k, v: reference_attention(q, k, v, tree_mask(ends), DEFAULT)


def shifted_segments(layout: TreeLayout):
    """Off by one: every segment's last row is taken for its descendant's first."""
    starts = layout.segment_starts.clone()
    starts[1:-1] -= 1
    wrong = dataclasses.replace(layout, segment_starts=starts)
    return lambda q, k, v: reference_attention(q, k, v, tree_mask(wrong.row_subtree_ends), DEFAULT)


@pytest.mark.parametrize("wrong", [top_left_causal, one_level, sibling_leak, plain_causal, shifted_segments])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_wrong_masks_are_caught(wrong, dtype: torch.dtype) -> None:
    """The comparisons above fail for each of these, in every dtype and for every tensor."""
    plan = plan_of(longer(NESTED, 3))
    layout, tensors = TreeLayout.from_plan(plan), inputs(plan, dtype)
    truth = by_tree(plan, [x.double() for x in tensors], "reference")
    reference, actual = each_by_itself(plan, *tensors), with_gradients(wrong(layout), plan, *tensors)
    for name, *one in zip(NAMES, actual, reference, truth, strict=True):
        with pytest.raises(AssertionError, match=f"{name} .* worst element at"):
            assert_within_reference_error(*one, names=name)
    if dtype == torch.float64:
        with pytest.raises(AssertionError):
            assert_equal_in_float64(actual, truth)


class TestValidation:
    plan = plan_of(NESTED)
    U = plan.num_rows

    def attend(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **options) -> Tensor:
        return tree_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), self.plan, **options)

    def test_rows(self) -> None:
        good, short = (self.U, 2, 8), (self.U - 1, 2, 8)
        for place, name in enumerate(("query", "key", "value")):
            shapes = [good] * 3
            shapes[place] = short
            message = (
                rf"{name} must be \(U, heads, head_dim\) with U = {self.U} rows, the plan's; got \({self.U - 1}, 2, 8\)"
            )
            with pytest.raises(ValueError, match=message):
                self.attend(*shapes)

    def test_dimensions(self) -> None:
        with pytest.raises(ValueError, match=rf"query must be .* got \(1, {self.U}, 2, 8\)"):
            self.attend((1, self.U, 2, 8), (self.U, 2, 8), (self.U, 2, 8))

    @pytest.mark.parametrize("heads", [(3, 2, 2), (2, 4, 4), (2, 2, 1)])
    def test_heads(self, heads: tuple[int, int, int]) -> None:
        message = "must be a multiple of those of key and value: got {}, {} and {}".format(*heads)
        with pytest.raises(ValueError, match=message):
            self.attend(*((self.U, n, 8) for n in heads))

    def test_head_dim_of_key(self) -> None:
        with pytest.raises(ValueError, match="head_dim must agree, got 8, 4 and 8"):
            self.attend((self.U, 2, 8), (self.U, 2, 4), (self.U, 2, 8))

    def test_head_dim_of_value(self) -> None:
        """Key and value are (U, K, H) both; a torch kernel says so in words of its own, an eager one computes it."""
        with pytest.raises(ValueError, match="head_dim"):
            self.attend((self.U, 2, 8), (self.U, 2, 8), (self.U, 2, 4))

    def test_dtypes(self) -> None:
        q = torch.zeros(self.U, 2, 8)
        with pytest.raises(ValueError, match=r"value is torch\.bfloat16 on cpu, query is torch\.float32 on cpu"):
            tree_attention(q, q, q.bfloat16(), self.plan)

    def test_integers(self) -> None:
        q = torch.zeros(self.U, 2, 8, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"torch\.int64"):
            tree_attention(q, q, q, self.plan)

    def test_devices(self) -> None:
        q = torch.zeros(self.U, 2, 8)
        with pytest.raises(ValueError, match=r"key is torch\.float32 on meta, query is torch\.float32 on cpu"):
            tree_attention(q, q.to("meta"), q, self.plan)
        with pytest.raises(
            ValueError, match=r"the plan is on cpu, query on meta; move it with TreeLayout\.to\(device\)"
        ):
            tree_attention(*(q.to("meta"),) * 3, TreeLayout.from_plan(self.plan))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"softcap": 0.0}, "softcap must be positive, or None for no soft-cap; got 0.0"),
            ({"window": 0}, r"window must be at least 1 \(a query sees itself\), or None for no window; got 0"),
            (
                {"sinks": torch.zeros(3)},
                r"sinks must be \(2,\), one floating-point logit for each query head; got \(3,\)",
            ),
            ({"sinks": torch.zeros(2, dtype=torch.int64)}, r"sinks must be .* torch\.int64"),
            ({"sinks": torch.zeros(2, device="meta")}, "sinks are on meta, query on cpu"),
            (
                {"window": 2, "attention": "cascade"},
                "attention='cascade' cannot be used: .* attention='auto' or 'path' keeps",
            ),
            ({"softcap": 1.0, "kernel": "torch"}, "kernel='torch' cannot be used: computes no soft-cap; kernel='auto'"),
        ],
    )
    def test_modifiers(self, options: dict, message: str) -> None:
        shape = self.U, 2, 8
        with pytest.raises(ValueError, match=message):
            self.attend(shape, shape, shape, **options)

    def test_kernel_that_cannot_be_had(self) -> None:
        shape = self.U, 2, 8
        with pytest.raises(ValueError, match="kernel='flash_attn' cannot be used: needs CUDA, the tensors are on cpu"):
            self.attend(shape, shape, shape, kernel="flash_attn")


class TestChoice:
    @pytest.fixture(autouse=True)
    def nothing_chosen_yet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention_module._choice.cache_clear()
        monkeypatch.setattr(attention_module, "_LOGGED", set())

    @pytest.fixture
    def without_flash_attn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    @pytest.fixture
    def with_flash_attn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "flash_attn" else None)

    @pytest.fixture
    def with_flash_attn_3(self, with_flash_attn: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.kernels.refusals.flash_3_missing", lambda device: None)

    def test_unknown_names(self) -> None:
        names = "auto, cascade, path, expand, reference, tree"
        with pytest.raises(UserError, match=f"attention must be {names}; got 'flex'"):
            choose_attention("flex", "auto", CPU, torch.float32, 64)
        with pytest.raises(
            UserError, match="kernel must be auto, torch, flash_attn, flash_attn_3, cudnn, eager; got 'triton'"
        ):
            choose_attention("auto", "triton", CPU, torch.float32, 64)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_on_cpu(self, dtype: torch.dtype) -> None:
        choice = choose_attention("auto", "auto", CPU, dtype, 17)
        assert (choice.strategy, choice.kernel) == ("cascade", "torch")

    def test_by_name(self) -> None:
        choice = choose_attention("path", "eager", CPU, torch.float32, 64)
        assert str(choice) == "attention=path, kernel=eager (path: as chosen; eager: as chosen)"
        assert choose_attention("reference", "auto", CPU, torch.float32, 64).kernel == "none"

    def test_on_cuda(self, with_flash_attn: None) -> None:
        assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 128).kernel == "flash_attn"
        assert choose_attention("auto", "torch", CUDA, torch.bfloat16, 128).kernel == "torch"

    def test_on_hopper(self, with_flash_attn_3: None) -> None:
        """Version 3 first; 2 for heads that 3 cannot add up in a fixed order."""
        assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 128).kernel == "flash_attn_3"
        assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 128, softcap=True).kernel == "flash_attn_3"
        assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 64, window=True).kernel == "flash_attn_3"
        wide = choose_attention("auto", "auto", CUDA, torch.bfloat16, 256)
        assert wide.kernel == "flash_attn"
        assert "flash_attn_3 takes head dims that are multiples of 8 up to 192, got 256" in wide.reason

    def test_on_another_gpu(self, with_flash_attn: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.kernels.refusals.flash_3_missing", lambda device: "needs a Hopper GPU")
        choice = choose_attention("auto", "auto", CUDA, torch.bfloat16, 128)
        assert choice.kernel == "flash_attn" and "flash_attn_3 needs a Hopper GPU" in choice.reason
        with pytest.raises(UserError, match="kernel='flash_attn_3' cannot be used: needs a Hopper GPU; kernel='auto'"):
            choose_attention("auto", "flash_attn_3", CUDA, torch.bfloat16, 128)

    @pytest.fixture
    def on_a_card(self, without_flash_attn: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU of compute capability 10.0 that has all that cuDNN's attention needs."""
        monkeypatch.setattr("radixtrain.kernels.refusals.cudnn_missing", lambda device: None)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))

    @pytest.mark.parametrize("attention", ["auto", "cascade", "path", "expand"])
    def test_cudnn_by_request(self, on_a_card: None, attention: str) -> None:
        choice = choose_attention(attention, "cudnn", CUDA, torch.bfloat16, 128)
        assert choice.kernel == "cudnn"
        assert choice.reason.endswith("cudnn: as chosen, and torch runs what cuDNN does not take")
        windowed = choose_attention(
            attention if attention != "cascade" else "path", "cudnn", CUDA, torch.bfloat16, 128, window=True
        )
        assert windowed.kernel == "cudnn", "torch runs those calls"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("modifier", [{}, {"window": True}, {"softcap": True}])
    def test_cudnn_is_never_chosen_by_auto(
        self, on_a_card: None, dtype: torch.dtype, modifier: dict[str, bool]
    ) -> None:
        choice = choose_attention("auto", "auto", CUDA, dtype, 128, **modifier)
        assert choice.kernel in ("torch", "eager") and "cudnn" not in choice.reason

    @pytest.mark.parametrize(
        ("device", "dtype", "head_dim", "softcap", "reason"),
        [
            (CPU, torch.bfloat16, 64, False, "needs CUDA, the tensors are on cpu"),
            (CUDA, torch.float32, 64, False, "takes float16 and bfloat16, got torch.float32"),
            (CUDA, torch.bfloat16, 136, False, "takes head dims that are multiples of 8 up to 128, got 136"),
            (CUDA, torch.bfloat16, 60, False, "takes head dims that are multiples of 8 up to 128, got 60"),
            (CUDA, torch.bfloat16, 64, True, "computes no soft-cap"),
        ],
    )
    def test_what_cudnn_does_not_take(
        self, on_a_card, device, dtype, head_dim: int, softcap: bool, reason: str
    ) -> None:
        with pytest.raises(UserError, match=f"kernel='cudnn' cannot be used: {reason}; kernel='auto' takes what can"):
            choose_attention("auto", "cudnn", device, dtype, head_dim, softcap=softcap)

    def test_a_machine_without_cudnn(self, on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.kernels.refusals.cudnn_missing", lambda device: "needs cuDNN 9.10")
        with pytest.raises(UserError, match=r"kernel='cudnn' cannot be used: needs cuDNN 9\.10; kernel='auto'"):
            choose_attention("auto", "cudnn", CUDA, torch.bfloat16, 64)

    def test_cudnn_with_a_window_on_a_torch_that_takes_none(self, on_a_card, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.kernels.refusals.takes_window", lambda: False)
        with pytest.raises(UserError, match="kernel='cudnn' cannot be used: takes no sliding window in torch 2"):
            choose_attention("auto", "cudnn", CUDA, torch.bfloat16, 64, window=True)

    def test_on_cuda_without_flash_attn(self, without_flash_attn: None) -> None:
        choice = choose_attention("auto", "auto", CUDA, torch.float16, 256)
        assert choice.kernel == "torch"
        assert "flash-attn is not installed" in choice.reason
        with pytest.raises(UserError, match=r"flash-attn is not installed \(pip install 'radixtrain\[flash\]'"):
            choose_attention("auto", "flash_attn", CUDA, torch.float16, 64)

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "reason"),
        [
            (torch.float32, 64, "takes float16 and bfloat16, got torch.float32"),
            (torch.bfloat16, 17, "takes head dims that are multiples of 8 up to 256, got 17"),
            (torch.bfloat16, 264, "takes head dims that are multiples of 8 up to 256, got 264"),
        ],
    )
    def test_what_cuda_kernels_do_not_take(
        self, with_flash_attn, dtype: torch.dtype, head_dim: int, reason: str
    ) -> None:
        choice = choose_attention("auto", "auto", CUDA, dtype, head_dim)
        assert choice.kernel == "eager"
        assert f"flash_attn {reason}" in choice.reason and f"torch {reason}" in choice.reason
        for kernel in ("torch", "flash_attn"):
            with pytest.raises(UserError, match=f"kernel='{kernel}' cannot be used: {reason}; kernel='auto'"):
                choose_attention("auto", kernel, CUDA, dtype, head_dim)

    def test_soft_cap(self, with_flash_attn: None) -> None:
        choice = choose_attention("auto", "auto", CPU, torch.float32, 64, softcap=True)
        assert str(choice) == (
            "attention=cascade, kernel=eager (cascade: no row is copied; eager: on cpu, torch computes no soft-cap)"
        )
        assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 64, softcap=True).kernel == "flash_attn"

    def test_soft_cap_on_cuda_without_flash_attn(self, without_flash_attn: None) -> None:
        choice = choose_attention("auto", "auto", CUDA, torch.bfloat16, 64, softcap=True)
        assert choice.kernel == "eager"
        assert "flash-attn is not installed" in choice.reason and "torch computes no soft-cap" in choice.reason

    def test_window(self) -> None:
        choice = choose_attention("auto", "auto", CPU, torch.float32, 64, window=True)
        assert str(choice) == (
            "attention=path, kernel=torch (path: a sliding window binds, which cascade cannot keep; torch: on cpu)"
        )
        assert choose_attention("expand", "auto", CPU, torch.float32, 64, window=True).strategy == "expand"

    def test_window_on_a_torch_that_takes_none(self, without_flash_attn, monkeypatch: pytest.MonkeyPatch) -> None:
        assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 64, window=True).kernel == "torch"
        attention_module._choice.cache_clear()
        monkeypatch.setattr("radixtrain.kernels.refusals.takes_window", lambda: False)
        choice = choose_attention("auto", "auto", CUDA, torch.bfloat16, 64, window=True)
        assert choice.kernel == "eager" and "torch takes no sliding window in torch 2" in choice.reason

    def test_logged_once_in_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        plan = plan_of(NESTED)
        with caplog.at_level(logging.INFO, logger="radixtrain.attention"):
            for _ in range(3):
                q, k, v, _ = inputs(plan, torch.float32)
                tree_attention(q, k, v, plan)
        assert caplog.messages == ["attention=cascade, kernel=torch (cascade: no row is copied; torch: on cpu)"]

    def test_a_measurement_is_not_logged_and_counts_as_new(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="radixtrain.attention"):
            with unlogged():
                choose_attention("path", "auto", CPU, torch.float32, 8)
            assert not caplog.messages
            for _ in range(2):
                choose_attention("path", "auto", CPU, torch.float32, 8)
        assert caplog.messages == ["attention=path, kernel=torch (path: as chosen; torch: on cpu)"]

    def test_a_choice_that_was_forgotten_is_not_logged_again(self, caplog: pytest.LogCaptureFixture) -> None:
        """More calls of different head dims than are remembered, and one line."""
        with caplog.at_level(logging.INFO, logger="radixtrain.attention"):
            for head_dim in [*range(1, 100), *range(1, 100)]:
                choose_attention("auto", "auto", CPU, torch.float32, head_dim)
        assert len(caplog.messages) == 1

    def test_refusal_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO), pytest.raises(UserError, match="flash_attn"):
            choose_attention("auto", "flash_attn", CPU, torch.bfloat16, 64)
        assert not caplog.messages

    def test_choice_reads_as_a_line(self) -> None:
        assert str(AttentionChoice("path", "eager", "why")) == "attention=path, kernel=eager (why)"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_a_row_that_broke_breaks_no_other_branch(attention: str, broken: float) -> None:
    """Branches that share a bundle and its mask: 0 x NaN would be NaN. What no other sequence has may break with it."""
    plan = plan_of(NESTED)
    q, k, v, dout = inputs(plan, torch.float32)
    own = torch.tensor(plan.inverse_indices[plan.cu_seqlens[2] - 2 : plan.cu_seqlens[2]])  # 4, 4 of the second sequence
    k[own[-1]], v[own[-1]] = broken, broken
    dout[own] = 0
    out, *_ = by_tree(plan, [q, k, v, dout], attention)
    others = torch.ones(plan.num_rows, dtype=torch.bool).index_fill(0, own, False)
    assert out[others].isfinite().all()
    clean = by_tree(plan, [q, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), dout], attention)
    assert relative_error(out[others], clean[0][others]) <= 1e-6


@with_tree
class TestTree:
    """`attention="tree"`: by request only, and refused by name if it cannot run."""

    plan = plan_of(NESTED)

    def attend(self, dtype: torch.dtype = torch.float32, head_dim: int = 8, **options) -> Tensor:
        q, k, v, _ = inputs(self.plan, dtype, head_dim=head_dim)
        return tree_attention(q, k, v, self.plan, attention="tree", **options)

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sequences=ragged_batches(min_length=0), pad_to_multiple_of=st.sampled_from([None, 8]))
    def test_generated(self, sequences: list[list[int]], pad_to_multiple_of: int | None) -> None:
        plan = plan_of([*sequences, [3] * 4], pad_to_multiple_of=pad_to_multiple_of)
        tensors = inputs(plan, torch.float32, (2, 1), 4)
        truth = by_tree(plan, [x.double() for x in tensors], "reference")
        for name, x, exact in zip(NAMES, by_tree(plan, tensors, "tree"), truth, strict=True):
            # one bar for every try, small as they are: sums of at most a hundred terms of order one
            assert (x - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps, name

    def test_scale(self) -> None:
        tensors = inputs(self.plan, torch.float32)
        options = {"scale": 0.7}
        truth = by_tree(self.plan, [x.double() for x in tensors], "reference", **options)
        reference = by_tree(self.plan, tensors, "reference", **options)
        assert_within_reference_error(by_tree(self.plan, tensors, "tree", **options), reference, truth, names=NAMES)

    def test_never_by_auto(self) -> None:
        assert (*EVERYWHERE, "tree") == STRATEGIES
        for device, dtype in ((CPU, torch.float32), (CUDA, torch.bfloat16)):
            assert choose_attention("auto", "auto", device, dtype, 64).strategy == "cascade"
        choice = choose_attention("tree", "auto", CPU, torch.float32, 64)
        assert str(choice) == "attention=tree, kernel=triton (one tiled kernel, by request)"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"softcap": 1.0}, "computes no soft-cap"),
            ({"window": 2}, "computes no sliding window, and one is shorter than the batch's longest sequence"),
            ({"sinks": torch.zeros(4)}, "computes no sinks"),
            ({"dtype": torch.float64}, "takes bfloat16, float16, float32, got torch.float64"),
            ({"head_dim": 257}, "takes head dims up to 256, got 257"),
            ({"dtype": torch.bfloat16}, "runs on a CPU under Triton's interpreter, which gets bfloat16 wrong"),
        ],
    )
    def test_what_it_does_not_take(self, options: dict, message: str) -> None:
        with pytest.raises(UserError, match=f"attention='tree' cannot be used: {message}; attention='auto' takes what"):
            self.attend(**options)

    def test_a_kernel_by_name(self) -> None:
        with pytest.raises(UserError, match="kernel='torch' cannot be used: attention='tree' has a kernel of its own"):
            self.attend(kernel="torch")

    def test_a_cpu_without_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention_module._choice.cache_clear()
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(UserError, match=r"Triton needs CUDA, the tensors are on cpu \(TRITON_INTERPRET=1 runs it"):
            self.attend()

    def test_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention_module._choice.cache_clear()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"attention='tree' cannot be used: Triton is not installed \(pip install"):
            self.attend()

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "sizes"),
        [(torch.bfloat16, 128, (128, 64)), (torch.float16, 192, (64, 16)), (torch.float32, 8, (32, 16))],
    )
    def test_a_device_without_tiles_says_how_to_ask_for_them(
        self, dtype: torch.dtype, head_dim: int, sizes: tuple[int, int]
    ) -> None:
        """And with tiles too large for it. Torch's meta device, whose values cannot be read, stands in for CUDA."""
        q = torch.zeros(self.plan.num_rows, 2, head_dim, dtype=dtype, device="meta")
        asked = rf"RadixCollator\(tree_tiles=\({sizes[0]}, {sizes[1]}\)\)"
        with pytest.raises(UserError, match=f"attention='tree' needs the lists of tiles in the batch, .* {asked}, or"):
            tree_attention(q, q, q, TreeLayout.from_plan(self.plan).to("meta"), attention="tree")
        large = TreeLayout.from_plan(self.plan, tiles=(128, 128)).to("meta")
        with pytest.raises(UserError, match=rf"takes tiles of up to .* the batch has \(128, 128\): set {asked}"):
            tree_attention(q, q, q, large, attention="tree")
        fitting = TreeLayout.from_plan(self.plan, tiles=sizes).to("meta")
        assert tree_attention(q, q, q, fitting, attention="tree").shape == q.shape

    @pytest.mark.parametrize("collator", [RadixCollator(tree_tiles=True), RadixCollator()], ids=["tiles", "none"])
    def test_a_model(self, tiny_qwen3: Callable[..., Any], collator: RadixCollator) -> None:
        """Every gradient of a tiny Qwen3, against ordinary Hugging Face. On a CPU tiles may be missing."""
        features = [{"input_ids": ids, "labels": ids} for ids in longer(NESTED[:4], 2)]
        report = verify_equivalence(tiny_qwen3(), features, attention="tree", collator=collator, precisions=["float32"])
        assert report.passed, str(report)

    def test_a_model_really_runs_it(self, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        from radixtrain.kernels import tree_triton

        ran, run = [], tree_triton.tiled_tree_attention
        monkeypatch.setattr(tree_triton, "tiled_tree_attention", lambda *args: ran.append(args[3].held) or run(*args))
        model = prepare_model(tiny_qwen3(), attention="tree")
        features = [{"input_ids": ids, "labels": ids} for ids in NESTED]
        model(**RadixCollator(tree_tiles=True)(features)).loss.backward()
        assert ran == [128, 128], "two layers, with the tiles of the batch"

    def test_a_model_on_a_device_says_how_to_ask_for_tiles(
        self, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_enabled = torch.is_autocast_enabled
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: device != ("meta",) and is_enabled(*device))
        model = prepare_model(tiny_qwen3().to(torch.bfloat16).to("meta"), attention="tree")
        batch = RadixCollator()([{"input_ids": ids, "labels": ids} for ids in NESTED])
        batch = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in batch.items()}
        with pytest.raises(
            UserError, match=r"layer 0.*: attention='tree' needs .* RadixCollator\(tree_tiles=\(128, 64"
        ):
            model(**batch)


CACHED = [7, 7, 8, 9, 9]  # what every sequence of TestCached begins with: stored rows
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)


class TestCached:
    """Beside tree attention on the whole tree, of which the first rows are stored and the others new.

    Stored rows are in slots 20, 18, 16 ...; the new row i of a prefill in slot 30 + i. Lanes begin at slot 30.
    """

    def whole(self, sequences: list[list[int]]) -> tuple[PrefixPlan, list[Tensor]]:
        plan = plan_of([[*CACHED, *sequence] for sequence in sequences])
        return plan, inputs(plan, torch.float64)[:3]

    def store(self, rows: Tensor, slots: Tensor) -> Tensor:
        """(C, K, H). NaN where nothing is stored but in the lanes, where a mask hides zeros."""
        stored = rows.new_full((80, *rows.shape[1:]), float("nan"))
        stored[30:] = 0
        stored[slots] = rows
        return stored

    def prefill(self, sequences: list[list[int]], **options) -> tuple[Tensor, Tensor]:
        """Of the new rows, from the store and from the whole tree."""
        plan, (q, k, v) = self.whole(sequences)
        num_cached, new = len(CACHED), plan_of(sequences)
        slots = torch.cat([20 - 2 * torch.arange(num_cached), 30 + torch.arange(new.num_rows)])
        assert plan.num_rows == len(slots)

        def path(run: int) -> np.ndarray:
            start, end = new.cu_seqlens[new.path_sequences[run] :][:2]
            return np.concatenate([slots[:num_cached].numpy(), 30 + new.inverse_indices[start:end]])

        layout = CachedLayout(
            num_rows=new.num_rows,
            max_seqlen=int(np.diff(plan.cu_seqlens).max()),
            written_rows=None,
            slots=slots[num_cached:],
            shared=(shared_piece(np.arange(new.num_rows), slots[:num_cached].numpy(), CPU),),
            paths=Paths(new.path_cu_seqlens_q, path),
            prompts=TreeLayout.from_plan(new),
        )
        stored = self.store(k, slots), self.store(v, slots)
        found = cached_attention(*(x[num_cached:] for x in (q, k, v)), stored, layout, **options)
        return found, tree_attention(q, k, v, plan, **options)[num_cached:]

    def decode(self, sequences: list[list[int]], **options) -> tuple[Tensor, Tensor]:
        """Of the last tokens, which no two sequences share. What follows the stored rows is in lanes of 7."""
        plan, (q, k, v) = self.whole(sequences)
        rows = [torch.tensor(plan.inverse_indices[slice(*plan.cu_seqlens[i:][:2])]) for i in range(len(sequences))]
        last, lengths = torch.stack([each[-1] for each in rows]), torch.tensor([len(each) for each in sequences])
        cached = 20 - 2 * torch.arange(len(CACHED))
        slots = [torch.cat([cached, 30 + 7 * i + torch.arange(length)]) for i, length in enumerate(lengths)]
        mask = torch.zeros(len(rows), 6).masked_fill(torch.arange(6) >= lengths[:, None], float("-inf"))
        layout = CachedLayout(
            num_rows=len(rows),
            max_seqlen=int(lengths.max()) + len(CACHED),
            written_rows=None,
            slots=torch.stack([each[-1] for each in slots]),
            shared=(shared_piece(np.arange(len(rows)), cached.numpy(), CPU),),
            paths=Paths(np.arange(len(rows) + 1), lambda run: slots[run].numpy()),
            lanes=Lanes(30, 7, mask),
        )
        stored = tuple(self.store(x[torch.cat(rows)], torch.cat(slots)) for x in (k, v))
        found = cached_attention(*(x[last] for x in (q, k, v)), stored, layout, **options)
        return found, tree_attention(q, k, v, plan, **options)[last]

    OPTIONS: tuple[dict[str, Any], ...] = (
        {},
        {"scale": 0.7},
        {"sinks": SINKS},
        {"softcap": 0.7},
        *({"window": window} for window in (1, 2, 4, 7, 10)),  # the longest sequence has 11 tokens
        {"window": 4, "sinks": SINKS, "softcap": 0.7},
    )

    @pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "plain")
    @pytest.mark.parametrize("kernel", ["auto", "eager"])
    def test_against_the_whole_tree(self, options: dict, kernel: str) -> None:
        prompts, answers = NESTED, [[*sequence, 40 + i] for i, sequence in enumerate(NESTED) if len(sequence) < 6]
        for found, expected in (
            self.prefill(prompts, kernel=kernel, **options),
            self.decode(answers, kernel=kernel, **options),
        ):
            assert relative_error(found, expected) <= 1e-12

    @settings(max_examples=30, deadline=None)
    @given(ragged_batches(max_length=6), st.sampled_from([None, 1, 3, 6]))
    def test_generated_prompts(self, sequences: list[list[int]], window: int | None) -> None:
        found, expected = self.prefill(sequences, window=window)
        assert relative_error(found, expected) <= 1e-12

    def test_a_window_that_does_not_bind_asks_for_no_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would copy every row that a sequence sees."""

        def refuse(*arguments: object) -> None:
            raise AssertionError("not needed")

        monkeypatch.setattr(CachedLayout, "windowed", refuse)
        for attend in (self.prefill, self.decode):
            sequences = [[1, 1, 2, 3], [1, 2, 2, 2, 2, 4]]
            assert torch.equal(attend(sequences, window=11)[0], attend(sequences)[0])
            with pytest.raises(AssertionError, match="not needed"):
                attend(sequences, window=10)

    def test_no_gradient(self) -> None:
        q = torch.randn(1, 2, 8, requires_grad=True)
        assert cached_attention(q, q, q, (q, q), self.one_row()).requires_grad is False

    def one_row(self) -> CachedLayout:
        lanes = Lanes(0, 1, torch.zeros(1, 1))
        return CachedLayout(
            1, 1, None, torch.zeros(1, dtype=torch.int64), (), Paths(np.arange(2), np.arange), None, lanes
        )

    @pytest.mark.parametrize(
        ("shapes", "options", "error", "message"),
        [
            (
                [(2, 2, 8)] * 3,
                {},
                ValueError,
                r"query must be \(U, heads, head_dim\) with U = 1 rows, .* got \(2, 2, 8\)",
            ),
            ([(1, 2, 8), (1, 2, 4), (1, 2, 8)], {}, ValueError, "head_dim must agree, got 8, 4 and 8"),
            ([(1, 3, 8), (1, 2, 8), (1, 2, 8)], {}, ValueError, "heads of query must be a multiple"),
            ([(1, 2, 8)] * 3, {"softcap": 0.0}, ValueError, r"softcap must be positive, .* got 0\.0"),
            ([(1, 2, 8)] * 3, {"window": 0}, ValueError, "window must be at least 1 .* got 0"),
            ([(1, 2, 8)] * 3, {"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(2,\), .* got \(3,\)"),
            ([(1, 2, 8)] * 3, {"kernel": "tree"}, UserError, "kernel must be auto, .*; got 'tree'"),
            ([(1, 2, 8)] * 3, {"kernel": "flash_attn"}, UserError, "kernel='flash_attn' cannot be used"),
            ([(1, 2, 8)] * 3, {"kernel": "torch", "softcap": 1.0}, UserError, "kernel='torch' cannot be used"),
        ],
    )
    def test_errors(self, shapes: list, options: dict, error: type[Exception], message: str) -> None:
        q, k, v = (torch.zeros(shape) for shape in shapes)
        with pytest.raises(error, match=message):
            cached_attention(q, k, v, (k, v), self.one_row(), **options)
