"""The strategies of tree attention as they run on CUDA, for stand-ins of its kernels: plans, inputs and gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.cascade import cascade_attention
from radixtrain.kernels.expand import expand_attention
from radixtrain.kernels.path import path_attention
from radixtrain.kernels.ragged import VarlenKernel
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan


def plan_of(sequences: list[list[int]], **options) -> PrefixPlan:
    return build_prefix_plan(np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]), **options)


def inputs(plan: PrefixPlan, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, as Hugging Face hands them over: (U, N, H) seen in (N, U, H) memory. No loss on padding."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, plan.num_rows, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).transpose(0, 1) for s in shapes]
    tensors[3][plan.num_unique_tokens :] = 0
    return tensors


def with_gradients(attention, plan: PrefixPlan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out of the unique tokens (that of padding means nothing), dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return [out.detach()[: plan.num_unique_tokens], *torch.autograd.grad(out, leaves, dout)]


def on_cuda(strategy: str, layout: TreeLayout, kernel: VarlenKernel, scoring: Scoring, sinks: Tensor | None = None):
    """A strategy with the pieces that it takes on CUDA: for `cascade` one call a level."""
    options = kernel, scoring, sinks
    if strategy == "cascade":
        pieces = tuple(layout.packed_pieces())
        return lambda q, k, v: cascade_attention(q, k, v, pieces, *options)
    if strategy == "path":
        return lambda q, k, v: path_attention(q, k, v, layout.path_keys, layout.paths, *options)
    indices = layout.inverse_indices, layout.gather_indices
    return lambda q, k, v: expand_attention(q, k, v, *indices, layout.sequences, *options)


def by_reference(layout: TreeLayout, scoring: Scoring, sinks: Tensor | None = None):
    mask = tree_mask(layout.row_subtree_ends, layout.row_depths, scoring.window)
    return lambda q, k, v: reference_attention(q, k, v, mask, scoring, sinks)
