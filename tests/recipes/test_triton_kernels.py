"""U rows, N query heads, K key/value heads, H head dim. `triton_device` is the device of Triton's kernels."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_of
from tiers import FULL, tries
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="pip install triton runs it")

from radixtrain.kernels.experimental import tree_triton
from radixtrain.kernels.experimental.tree_tiles import TreeTiles, tree_tiles
from radixtrain.kernels.experimental.tree_triton import tiled_tree_attention
from radixtrain.kernels.reference import tree_mask
from radixtrain.testing import (
    assert_within_reference_error,
    flash_attention_by_the_book,
    ragged_batches,
    relative_error,
)
from radixtrain.tree.plan import PrefixPlan

pytestmark = FULL
SCALE = 0.3
ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # of a mean of six numbers, and of the exponential of a logarithm
NAMES = ("out", "dq", "dk", "dv")
SMALL = [6, 6, 3, 4, 6, 6]  # a trunk of two rows, three branches below it: one row, one row, two rows


def deep_plan(levels: int = 3, run: int = 9, **options: int) -> PrefixPlan:
    """Two branches of odd length at every level, and one sequence that shares nothing."""
    rng = np.random.default_rng(0)
    sequences = [[1] * run]
    for level in range(1, levels):
        sequences = [[*x, 2 * level + branch, *rng.integers(20, 30, run)] for x in sequences for branch in (0, 1)]
    return plan_of([*sequences, [40] * run], **options)


def inputs(
    num_rows: int, dtype: torch.dtype, device: torch.device, heads: tuple[int, int] = (2, 1), head_dim: int = 20
) -> list[Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(num_rows, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def results(ends: list[int] | np.ndarray, tensors: list[Tensor], held: int = 16, walked: int = 16) -> list[Tensor]:
    """out and the gradients, on CPU."""
    *q_k_v, dout = tensors
    leaves = [x.detach().requires_grad_() for x in q_k_v]
    out = tiled_tree_attention(*leaves, tree_tiles(ends, held, walked).to(dout.device), SCALE)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def by_the_book(ends: list[int] | np.ndarray, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    mask = tree_mask(torch.tensor(np.asarray(ends)))
    out, _, *grads = flash_attention_by_the_book(*(x.cpu() for x in tensors), mask, SCALE)
    return out, *grads


def assert_exact(ends: list[int] | np.ndarray, tensors: list[Tensor], held: int = 16, walked: int = 16) -> None:
    """About as near to float64 as flash-attention's arithmetic in the same dtype."""
    actual = results(ends, tensors, held, walked)
    truth = by_the_book(ends, [x.double() for x in tensors])
    assert_within_reference_error(actual, by_the_book(ends, tensors), truth, names=NAMES)


def dense_tiles(ends: np.ndarray, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(I, J), bool, twice: the tiles of the mask that hold anything, and that hold everything."""
    num_rows = len(ends)
    rows = np.arange(num_rows)
    num_q, num_k = -(-num_rows // block_q), -(-num_rows // block_k)
    mask = np.zeros((num_q * block_q, num_k * block_k), dtype=bool)
    mask[:num_rows, :num_rows] = (rows <= rows[:, None]) & (rows[:, None] < ends)
    tiles = mask.reshape(num_q, block_q, num_k, block_k)
    return tiles.any((1, 3)), tiles.all((1, 3))


def tiles_by_query_block(lists: TreeTiles, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    some, full = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    starts, num_full, keys = lists.key_starts.tolist(), lists.num_full.tolist(), lists.key_blocks.numpy()
    for i in range(shape[0]):
        np.add.at(some[i], keys[starts[i] : starts[i + 1]], 1)
        np.add.at(full[i], keys[starts[i] : starts[i] + num_full[i]], 1)
    return some, full


def tiles_by_key_block(lists: TreeTiles, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    some, full = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    for j, (first, last, first_full, last_full) in enumerate(lists.query_runs.tolist()):
        assert first <= first_full <= last_full <= last
        some[first:last, j] += 1
        full[first_full:last_full, j] += 1
    return some, full


def assert_lists_are_the_mask(ends: np.ndarray, held: int, walked: int) -> None:
    lists = tree_tiles(ends, held, walked)
    for tiles, sizes in ((tiles_by_query_block, (held, walked)), (tiles_by_key_block, (walked, held))):
        expected = dense_tiles(ends, *sizes)
        assert all(np.array_equal(x, y) for x, y in zip(tiles(lists, expected[0].shape), expected, strict=True))


@settings(max_examples=tries(200, 10_000), deadline=None, database=None)
@given(sequences=ragged_batches(), held=st.integers(1, 9), walked=st.integers(1, 9), pad=st.sampled_from([1, 4]))
def test_lists_of_generated_tries(sequences: list[list[int]], held: int, walked: int, pad: int) -> None:
    assert_lists_are_the_mask(plan_of(sequences, pad_to_multiple_of=pad).row_subtree_ends, held, walked)


@pytest.mark.parametrize("ends", [[2, 1], [2, 3], [0, 2]])
def test_ends_that_no_tree_has(ends: list[int]) -> None:
    with pytest.raises(ValueError, match=r"subtree_ends\[[01]\] must lie in \[[12], 2\], got [013]"):
        tree_tiles(ends, 16, 16)


DEEP = [(torch.float32, 32, 16), (torch.bfloat16, 16, 32), (torch.float16, 16, 16)]


@pytest.mark.parametrize(("dtype", "held", "walked"), DEEP)
def test_deep_tries(triton_device: torch.device, dtype: torch.dtype, held: int, walked: int) -> None:
    plan = deep_plan(run=17)
    lists = tree_tiles(plan.row_subtree_ends, held, walked)
    assert plan.depth == 3 and plan.num_rows % held and 0 < lists.num_full.sum() < len(lists.key_blocks)
    assert_exact(plan.row_subtree_ends, inputs(plan.num_rows, dtype, triton_device), held, walked)


def test_a_block_in_parts(triton_device: torch.device) -> None:
    """The kernel of dk and dv walks a block of 64 queries in two parts."""
    plan = deep_plan(levels=2, run=71)
    lists = tree_tiles(plan.row_subtree_ends, 64, 64)
    first, last, first_full, last_full = lists.query_runs.T
    assert (last_full > first_full).any() and (last - first > last_full - first_full).any() and plan.num_rows % 64
    assert_exact(plan.row_subtree_ends, inputs(plan.num_rows, torch.float32, triton_device), 64, 64)


@pytest.mark.parametrize("head_dim", [1, 16, 33])
def test_heads(triton_device: torch.device, head_dim: int) -> None:
    ends = deep_plan(2).row_subtree_ends
    for heads in ((1, 1), (2, 2), (3, 1), (6, 2)):
        assert_exact(ends, inputs(len(ends), torch.float32, triton_device, heads, head_dim))


def test_non_contiguous(triton_device: torch.device) -> None:
    ends = deep_plan(2).row_subtree_ends
    tensors = inputs(len(ends), torch.float32, triton_device, heads=(4, 2))
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]  # as Hugging Face has them
    spread = [x.repeat_interleave(2, -1)[..., ::2] for x in tensors]
    broadcast = tensors[3][:1, :1, :1].expand(tensors[3].shape)  # the gradient of a sum
    assert not any(x.is_contiguous() for x in (*swapped, *spread, broadcast))
    for strided in (swapped, spread, [*tensors[:3], broadcast]):
        assert_exact(ends, strided)


def test_scores_far_apart(triton_device: torch.device) -> None:
    """Scores of thousands: nothing overflows, before the maximum is known or after, and a weight of one stays one.

    The bar is the condition number of exp, which is the score, times a rounding in either direction of the product.
    """
    ends = deep_plan().row_subtree_ends
    tensors = inputs(len(ends), torch.float32, triton_device)
    tensors[0] = tensors[0] * 1e3
    wide = [x.double() for x in tensors]
    actual, truth = results(ends, tensors), by_the_book(ends, wide)
    largest = float(torch.einsum("qnh,knh->nqk", wide[0], wide[1].expand_as(wide[0])).abs().max()) * SCALE
    assert largest > 1e3 and all(x.isfinite().all() for x in actual)
    for name, x, y in zip(NAMES, actual, truth, strict=True):
        if name in ("out", "dv"):
            assert relative_error(x, y) <= ROUNDINGS * largest, name


def test_wrong_lists_fail(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is left out, and a partial one that is taken for full."""
    ends = deep_plan().row_subtree_ends
    tensors = inputs(len(ends), torch.float32, triton_device)
    right = tree_tiles(ends, 16, 16)
    wrong_runs, wrong_full = right.query_runs.clone(), right.num_full.clone()
    wrong_runs[0, 1] -= 1
    wrong_full[-1] += 1
    for name, value in (("query_runs", wrong_runs), ("num_full", wrong_full)):
        wrong = TreeTiles(**{**vars(right), name: value})
        monkeypatch.setitem(globals(), "tree_tiles", lambda *_, wrong=wrong: wrong)
        with pytest.raises(AssertionError, match="relative error"):
            assert_exact(ends, tensors)


def test_opcheck(triton_device: torch.device) -> None:
    q, k, v, dout = inputs(len(SMALL), torch.float32, triton_device, heads=(2, 1), head_dim=3)
    tiles = tree_tiles(SMALL, 16, 16).to(triton_device)
    lists = (*tree_triton._lists(tiles), 16, 16, SCALE)
    torch.library.opcheck(tree_triton._forward, (*(x.requires_grad_() for x in (q, k, v)), *lists))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = tree_triton._forward(q, k, v, *lists)
    torch.library.opcheck(tree_triton._backward, (dout, q, k, v, out, lse, *lists))
