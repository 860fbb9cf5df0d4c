"""The mask of blocks against the tree mask, and FlexAttention's own formula with its gradient in float64.

What its kernels compute is for `test_cuda.py`; that they compile for a GPU is in `tests/claims/fake_cuda`.
"""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from radixtrain.kernels import tree_flex
from radixtrain.kernels.reference import tree_mask
from radixtrain.kernels.tree_flex import flex_tree_attention, tree_block_mask
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import ragged_batches
from radixtrain.tree.layout import TreeLayout
from tests.support import FULL, tries
from tests.support.batches import (
    DEEP,
    NESTED,
    assert_exact,
    attention_inputs,
    distances_of_plan,
    longer,
    one_softmax,
    plan_of,
    with_gradients,
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's formula with its gradient, which torch keeps for kernels that do not exist on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(tree_flex, "_compiled", lambda: tree_flex._flex)


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """(I, I), bool: the blocks of keys in the list of each block of queries."""
    found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts.flatten().tolist(), indices[0, 0].tolist(), strict=True)):
        found[row, columns[:count]] = True
    return found


@settings(max_examples=tries(400, 10_000), deadline=None)
@given(
    sequences=ragged_batches(min_length=0),
    pad_to_multiple_of=st.sampled_from([None, 8]),
    block=st.integers(2, 6),
    window=st.sampled_from([None, None, 1, 3]),
)
def test_blocks_are_those_of_the_mask(
    sequences: list[list[int]], pad_to_multiple_of: int | None, block: int, window: int | None
) -> None:
    """With a window some that hold nothing are looked at."""
    layout = TreeLayout.from_plan(plan_of([*sequences, [3] * 4], pad_to_multiple_of=pad_to_multiple_of))
    mask = tree_block_mask(layout.row_subtree_ends, layout.row_depths, window, block)
    pairs = tree_mask(layout.row_subtree_ends, layout.row_depths, window)
    assert torch.equal(flex.create_mask(mask.mask_mod, 1, 1, *pairs.shape, device="cpu")[0, 0], pairs)
    outside = -len(pairs) % block
    blocks = pad(pairs, (0, outside, 0, outside)).unflatten(0, (-1, block)).unflatten(2, (-1, block))
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert not (full & partial).any() and mask.shape == (1, 1, *pairs.shape)
    assert not (blocks.any(3).any(1) & ~(full | partial)).any(), "all that is seen is looked at"
    assert not (full & ~blocks.all(3).all(1)).any(), "no block is full that hides something"
    if window is None:
        assert torch.equal(full | partial, blocks.any(3).any(1)) and torch.equal(full, blocks.all(3).all(1))


def assert_like_the_formula(plan: Any, window: int | None, *sinks: Tensor, heads: tuple[int, int] = (4, 2)) -> None:
    """In float64, with every gradient."""
    layout, tensors = TreeLayout.from_plan(plan), attention_inputs(plan, torch.float64, heads)
    mask = tree_block_mask(layout.row_subtree_ends, layout.row_depths, window)
    truth = partial(one_softmax, distances=distances_of_plan(plan), scale=0.3, window=window)

    def ours(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return flex_tree_attention(q, k, v, mask, Scoring(0.3, window=window), *sinks)

    assert_exact(*(with_gradients(attend, tensors, *sinks) for attend in (ours, truth)), (heads, window))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_float64(on_cpu: None, window: int | None, with_sinks: bool) -> None:
    """Rows of padding too, and heads in groups and alone."""
    for heads in ((4, 2), (3, 1), (2, 2)):
        sinks = [torch.linspace(-1, 2, heads[0], dtype=torch.float64)] * with_sinks
        for sequences, options in ((longer(NESTED, 4), {"pad_to_multiple_of": 64}), (longer(DEEP, 3), {})):
            assert_like_the_formula(plan_of(sequences, **options), window, *sinks, heads=heads)


def test_made_without_reading_a_value() -> None:
    """Torch's meta device has no values: what is read there raises."""
    layout = TreeLayout.from_plan(plan_of(longer(NESTED, 20))).to("meta")
    for window in (None, 5):
        mask = tree_block_mask(layout.row_subtree_ends, layout.row_depths, window)
        assert {x.device.type for x in mask.as_tuple() if torch.is_tensor(x)} == {"meta"}


@FULL
def test_compiled_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for all windows."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tree_flex._flex, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(tree_flex, "_compiled", lambda: compiled)
    graphs = []
    for window, times in ((None, 20), (None, 29), (None, 40), (9, 29), (9, 40), (30, 20)):
        assert_like_the_formula(plan_of(longer(NESTED, times)), window)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[2] < graphs[3] == graphs[5]
