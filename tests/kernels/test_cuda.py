"""The kernels on a CUDA device: `make test-gpu`. What runs without one is in test_flash_signature.py."""

import importlib.util

import numpy as np
import pytest
import torch

from radixtrain import build_prefix_plan, tree_attention
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs these: make test-gpu"),
]
INSTALLED = ["torch", "eager", *(["flash_attn"] if importlib.util.find_spec("flash_attn") else [])]


def nested_plan():
    """A prompt, two branches of it, leaves on both: several segments on one level."""
    rng = np.random.default_rng(0)
    prompt, left, right = (rng.integers(0, 1000, length) for length in (200, 60, 40))
    leaves = [np.concatenate([prompt, branch, rng.integers(0, 1000, 30)]) for branch in (left, right) for _ in range(3)]
    return build_prefix_plan(np.concatenate(leaves), np.cumsum([0] + [len(leaf) for leaf in leaves]))


def gradients(out, inputs, dout):
    return [out, *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("kernel", INSTALLED)
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_strategies_in_bfloat16(attention, kernel):
    plan = nested_plan()
    generator = torch.Generator().manual_seed(0)
    shapes = [(plan.num_rows, heads, 64) for heads in (8, 2, 2, 8)]
    *inputs, dout = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    leaves = [x.cuda().requires_grad_() for x in inputs]
    actual = gradients(tree_attention(*leaves, plan, attention=attention, kernel=kernel), leaves, dout.cuda())
    wide = [x.double().requires_grad_() for x in inputs]
    truth = gradients(tree_attention(*wide, plan, attention="reference"), wide, dout.double())
    mask = torch.ones(plan.num_rows, plan.num_rows, dtype=torch.bool).tril()
    mask &= torch.arange(plan.num_rows)[:, None] < torch.tensor(plan.row_subtree_ends)[None, :]
    out, _, *grads = flash_attention_by_the_book(*inputs, dout, mask, 64**-0.5)
    assert_within_reference_error([x.cpu() for x in actual], [out, *grads], truth, names=("out", "dq", "dk", "dv"))
