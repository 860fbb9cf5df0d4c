"""Kernels of our own in Triton, beside the stock ones: README.md says what they have to show to come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from radixtrain.kernels import merge_attention, rows
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan
from triton_kernels.rows_triton import merge_rows_, sum_rows
from triton_kernels.tree_tiles import tiles_of
from triton_kernels.tree_triton import attention_on_tiles

__all__ = ["merge_rows_", "rows_by_triton", "sum_rows", "tiled_tree_attention"]


@contextmanager
def rows_by_triton() -> Iterator[None]:
    """Inside, radixtrain adds up repeated rows and merges pieces of attention by these kernels, backward passes too."""
    with patch.object(rows, "sum_rows", sum_rows), patch.object(merge_attention, "merge_piece", merge_rows_):
        yield


def tiled_tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: PrefixPlan | TreeLayout, scale: float) -> Tensor:
    """Attention of every row over itself and its ancestors, differentiable once. Returns (U, N, H), the dtype of q.

    q: (U, N, H), bfloat16, float16 or float32, H up to 256. k, v: (U, K, H), the dtype of q, N a multiple of K.
    tree: a layout on their device keeps its lists of tiles; a plan has them made in every call.
    """
    layout = tree if isinstance(tree, TreeLayout) else TreeLayout.from_plan(tree).to(q.device)
    return attention_on_tiles(q, k, v, tiles_of(layout, q), scale)
