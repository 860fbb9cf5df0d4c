"""The Triton kernels in `recipes/`: on CUDA, or interpreted on a CPU; compiled for an H100 that need not be there."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import DEEP, NESTED, attention_inputs, longer, plan_of
from tiers import FULL

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="pip install triton runs it")

import triton_kernels
from triton_kernels.tree_tiles import tree_tiles

from radixtrain import tree_attention
from radixtrain.kernels import rows as stock
from radixtrain.kernels.merge_attention import merge_piece
from radixtrain.kernels.reference import tree_mask
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout

pytestmark = FULL
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE, NAMES = 0.3, ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter gets bfloat16 wrong
@pytest.mark.parametrize(("sequences", "heads", "head_dim"), [(NESTED, (4, 2), 20), (DEEP, (3, 1), 16)])
def test_tiled_attention(dtype: torch.dtype, sequences: Any, heads: tuple[int, int], head_dim: int) -> None:
    """About as near to float64 as flash-attention's arithmetic in the same dtype, with rows of padding."""
    plan = plan_of(longer(sequences, 12), pad_to_multiple_of=32)
    layout = TreeLayout.from_plan(plan).to(DEVICE)
    tensors = attention_inputs(plan, dtype, heads, head_dim)
    leaves = [x.transpose(0, 1).contiguous().transpose(0, 1).to(DEVICE).requires_grad_() for x in tensors[:3]]
    out = triton_kernels.tiled_tree_attention(*leaves, layout, SCALE)
    actual = [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, tensors[3].to(DEVICE)))]
    mask = tree_mask(layout.row_subtree_ends.cpu())
    book, truth = (
        [out, *gradients]
        for out, _, *gradients in (
            flash_attention_by_the_book(*given, mask, SCALE) for given in (tensors, [x.double() for x in tensors])
        )
    )
    assert_within_reference_error(actual, book, truth, names=NAMES)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 3)])
def test_tiles_are_those_of_the_mask(sizes: tuple[int, int]) -> None:
    plan = plan_of(longer(NESTED, 3), pad_to_multiple_of=8)
    tiles, pairs = tree_tiles(plan.row_subtree_ends, *sizes), tree_mask(torch.tensor(plan.row_subtree_ends.copy()))
    for by_keys, (block_q, block_k) in ((False, sizes), (True, sizes[::-1])):
        over = torch.nn.functional.pad(pairs, (0, -len(pairs) % block_k, 0, -len(pairs) % block_q))
        blocks = over.unflatten(0, (-1, block_q)).unflatten(2, (-1, block_k))
        some, full = torch.zeros(2, blocks.shape[0], blocks.shape[2], dtype=torch.bool)
        if by_keys:
            for column, (first, last, first_full, last_full) in enumerate(tiles.query_runs.tolist()):
                some[first:last, column], full[first_full:last_full, column] = True, True
        else:
            for row, (start, end) in enumerate(pairwise(tiles.key_starts.tolist())):
                some[row, tiles.key_blocks[start:end].long()] = True
                full[row, tiles.key_blocks[start : start + tiles.num_full[row]].long()] = True
        assert torch.equal(some, blocks.any(3).any(1)) and torch.equal(full, blocks.all(3).all(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_sum_of_rows(dtype: torch.dtype) -> None:
    """Bit for bit what torch on a CPU adds up in float32, in the order of the terms, and rounds once."""
    for shape in ((), (3,), (17, 5), (1025,)):
        x = torch.randn(101, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        indices = torch.arange(101).mul(7) % 9  # of ten rows; the last has no term
        total = triton_kernels.sum_rows(x.to(DEVICE), indices.to(DEVICE), 10)
        assert total.dtype == dtype and torch.equal(total.cpu(), stock.sum_rows(x, indices, 10))


@pytest.mark.parametrize("rows", [slice(2, 7), torch.tensor([3, 9, 0, 4, 6])], ids=["slice", "indices"])
def test_merge(rows: slice | torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (10, 3, 20), (3, 10), (5, 3, 20), (3, 5)
    out, lse, *piece = (torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE) for shape in shapes)
    lse[:, 3], piece[1][:, 4] = -1e4, -1e4  # a side that counts for nothing, before and after
    rows = rows if isinstance(rows, slice) else rows.to(DEVICE)
    found, expected = [out.clone(), lse.clone()], [out.clone(), lse.clone()]
    triton_kernels.merge_rows_(*found, rows, *piece)
    merge_piece(*expected, rows, *piece)
    assert max(relative_error(x, y) for x, y in zip(found, expected, strict=True)) <= 1e-12


def test_inside_rows_are_by_triton() -> None:
    """Both, in the two directions of a strategy, and afterwards neither."""
    plan = plan_of(longer(NESTED, 2))
    q, k, v, dout = (x.to(DEVICE) for x in attention_inputs(plan, torch.float32))
    results: list[list[torch.Tensor]] = []
    for attention in ("cascade", "path"):
        for by_triton in (False, True):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            with triton_kernels.rows_by_triton() if by_triton else torch.enable_grad():
                assert (stock.sum_rows is triton_kernels.sum_rows) is by_triton
                out = tree_attention(*leaves, plan, attention=attention, kernel="eager")
                results.append([out, *torch.autograd.grad(out, leaves, dout)])
    bound = 100 * torch.finfo(torch.float32).eps  # sums of at most a hundred terms of order one
    for with_triton in results[1:]:
        assert max(relative_error(x, y) for x, y in zip(with_triton, results[0], strict=True)) <= bound


def test_compiles_for_an_h100(tmp_path: Path) -> None:
    """Down to machine code, in a process of its own: Triton interprets or compiles for as long as a process lives."""
    paths = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared = dict(json.loads(line) for line in done.stdout.splitlines())
    assert shared.keys() == {"_sum_kernel", "_merge_kernel", "_forward_kernel", "_dq_kernel", "_dkdv_kernel"}
    assert max(shared.values()) <= 227 * 1024, shared


def compile_without_running() -> None:
    """Every launch prints its kernel and the bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Chip:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)

    def compile_only(function: Any, *args: Any, warmup: bool, **options: Any) -> None:
        kernel = run(function, *args, warmup=True, **options)
        assert kernel.asm["cubin"]
        print(json.dumps([function.__name__, kernel.metadata.shared]))

    run, JITFunction.run = JITFunction.run, compile_only
    driver.set_active(Chip())
    triton_kernels.sum_rows(torch.zeros(40, 1024, dtype=torch.bfloat16), torch.arange(40) % 16, 16)
    piece = torch.zeros(32, 2, 128), torch.zeros(2, 32)
    triton_kernels.merge_rows_(torch.zeros(64, 2, 128), torch.zeros(2, 64), torch.arange(32), *piece)
    plan = plan_of([[1] * 64])
    for dtype, head_dim in ((torch.float16, 256), (torch.float32, 128), (torch.bfloat16, 64), (torch.bfloat16, 128)):
        q, k, v = (torch.zeros(64, heads, head_dim, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
        triton_kernels.tiled_tree_attention(q, k, v, plan, 0.1).backward(torch.zeros_like(q))


if __name__ == "__main__":
    compile_without_running()
