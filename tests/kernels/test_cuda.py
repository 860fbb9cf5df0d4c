"""The kernels on a CUDA device: `make test-gpu`. What runs without one is in test_flash.py."""

import importlib.util
import re
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from radixtrain import build_prefix_plan, tree_attention
from radixtrain.attention import PREFERRED_ON_CUDA, choose_attention
from radixtrain.errors import UserError
from radixtrain.kernels.cpu_loops import EagerKernel
from radixtrain.kernels.packages import PACKAGES, package_missing
from radixtrain.kernels.reference import tree_mask
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book
from radixtrain.tree.layout import TreeLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs these: make test-gpu"),
]
CUDA = torch.device("cuda")
INSTALLED_PACKAGES = [name for name in PACKAGES if package_missing(name, CUDA) is None]
BAR = 5 * 2**-8  # both round to bfloat16 what they have added up of rounded weights: 2 ** -9 of a number each time
INSTALLED = ["torch", "eager", *INSTALLED_PACKAGES]


def nested_plan():
    """A prompt, two branches of it, leaves on both: several segments on one level."""
    rng = np.random.default_rng(0)
    prompt, left, right = (rng.integers(0, 1000, length) for length in (200, 60, 40))
    leaves = [np.concatenate([prompt, branch, rng.integers(0, 1000, 30)]) for branch in (left, right) for _ in range(3)]
    return build_prefix_plan(np.concatenate(leaves), np.cumsum([0] + [len(leaf) for leaf in leaves]))


TREE = [("tree", "auto")] if importlib.util.find_spec("triton") else []
MODIFIERS = {
    "none": {},
    "sinks": {"sinks": True},
    "window": {"window": 100},
    "soft-cap": {"softcap": 5.0},
    "window and sinks": {"window": 100, "sinks": True},
    "soft-cap and window": {"softcap": 5.0, "window": 100},
}


def plain(q, k, v, plan, softcap=None, window=None, sinks=None):
    """The formula in the dtype of q, by autograd: what a model without a flash kernel computes."""
    layout = TreeLayout.from_plan(plan)
    mask = tree_mask(layout.row_subtree_ends, layout.row_depths, window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * 64**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1)[..., : len(q)], v)


def gradients(attend, tensors, dout, sinks=None, **options):
    leaves = [x.detach().requires_grad_() for x in (*tensors, *([] if sinks is None else [sinks]))]
    out = attend(*leaves[:3], **options, **({} if sinks is None else {"sinks": leaves[3]}))
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize("modifiers", MODIFIERS.values(), ids=MODIFIERS)
@pytest.mark.parametrize(("attention", "kernel"), [*product(("cascade", "path", "expand"), INSTALLED), *TREE])
def test_strategies_in_bfloat16(attention, kernel, modifiers):
    """As near to float64 as by the book; with modifiers, as the formula in bfloat16."""
    plan, options = nested_plan(), {name: value for name, value in modifiers.items() if name != "sinks"}
    asked = {name: name in modifiers for name in ("softcap", "window", "sinks")}
    try:
        choose_attention(attention, kernel, CUDA, torch.bfloat16, 64, **asked)
    except UserError:
        return  # refused with a reason, which test_attention.py reads
    generator = torch.Generator().manual_seed(0)
    shapes = [(plan.num_rows, heads, 64) for heads in (8, 2, 2, 8)]
    *inputs, dout = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    sinks = torch.linspace(-1, 3, 8).bfloat16() if "sinks" in modifiers else None
    given = {**options, "plan": plan}
    on_cuda = None if sinks is None else sinks.cuda()
    tree = partial(tree_attention, attention=attention, kernel=kernel)
    actual = gradients(tree, [x.cuda() for x in inputs], dout.cuda(), on_cuda, **given)
    wide = None if sinks is None else sinks.double()
    truth = gradients(plain, [x.double() for x in inputs], dout.double(), wide, **given)
    reference = gradients(plain, inputs, dout, sinks, **given)
    if not modifiers:
        mask = tree_mask(TreeLayout.from_plan(plan).row_subtree_ends)
        out, _, *grads = flash_attention_by_the_book(*inputs, dout, mask, 64**-0.5)
        reference = [out, *grads]
    assert_within_reference_error(actual[:4], reference[:4], truth[:4], names=("out", "dq", "dk", "dv"))
    if sinks is not None:  # eight numbers: too few for luck to average out, so one rounding of each is let through
        assert (actual[4] - truth[4]).norm() <= 2 * (reference[4] - truth[4]).norm() + 2**-8 * truth[4].norm()


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(CUDA)


def ragged_call():
    """Entries of several lengths, two of them without queries, and one of a single query."""
    queries, keys = (torch.tensor(lengths) for lengths in ([0, 100, 0, 1, 70], [64, 130, 5, 33, 70]))
    cu_seqlens = (torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(CUDA) for lengths in (queries, keys))
    return Ragged(*cu_seqlens, 100, 130, causal=True)


def assert_like_the_specification(kernel, ragged, heads, head_dim):
    """Both directions, with the out and lse of a merge with a piece of as much weight. Returns dk and dv too."""
    num_queries, num_keys = int(ragged.cu_seqlens_q[-1]), int(ragged.cu_seqlens_k[-1])
    q, dout, other = (rows(num_queries, heads[0], head_dim, seed=n) for n in range(3))
    k, v = (rows(num_keys, heads[1], head_dim, seed=n) for n in (3, 4))
    found, scoring = [], Scoring(head_dim**-0.5)
    for each in (kernel, EagerKernel()):
        out, lse = each.forward(q, k, v, ragged, scoring)
        grads = each.backward(dout, q, k, v, (out + other) / 2, lse + 0.7, ragged, scoring)
        found.append([out, lse, *grads])
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine.float() - theirs.float()).norm() <= BAR * theirs.float().norm()
    return found[0][3:]


@pytest.mark.parametrize("name", [name for name in INSTALLED if name != "eager"])
def test_kernels_against_the_specification(name):
    """Bottom-right causal, grouped heads, entries without queries."""
    for heads, head_dim in product([(4, 4), (8, 2), (4, 1)], [64, 128]):
        dk, dv = assert_like_the_specification(varlen_kernel(name, CUDA), ragged_call(), heads, head_dim)
        assert not dk[:64].any() and not dv[:64].any(), "keys that no query sees"


@pytest.mark.skipif(not INSTALLED_PACKAGES, reason="with flash-attn, flash-attn-3 or flash-attn-4 installed this runs")
@pytest.mark.parametrize("name", INSTALLED_PACKAGES)
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_the_same_bits_every_time(name, attention):
    """A backward in a fixed order. Builds of flash-attn-3 from before September 2025 have none."""
    plan = nested_plan()
    *inputs, dout = (rows(plan.num_rows, heads, 128, seed=heads) for heads in (8, 2, 2, 8))
    tree = partial(tree_attention, plan=plan, attention=attention, kernel=name)
    runs = [gradients(tree, inputs, dout) for _ in range(20)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@pytest.mark.skipif(not TREE, reason="with triton installed this runs")
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (256, torch.float16), (64, torch.float32)])
def test_tree_with_the_tiles_of_a_batch(head_dim, dtype):
    """Of the sizes that the error for a batch without tiles asks for."""
    plan = nested_plan()
    leaves = [torch.randn(plan.num_rows, heads, head_dim, device=CUDA, dtype=dtype) for heads in (8, 2, 2)]
    bare = TreeLayout.from_plan(plan).to(CUDA)
    with pytest.raises(UserError, match=r"RadixCollator\(tree_tiles=") as error:
        tree_attention(*leaves, bare, attention="tree")
    sizes = [int(size) for size in re.findall(r"tree_tiles=\((\d+), (\d+)\)", str(error.value))[0]]
    layout = TreeLayout.from_batch(TreeLayout.from_plan(plan, tiles=tuple(sizes)).to(CUDA).to_batch())
    exact = tree_attention(*(x.double() for x in leaves), bare, attention="reference")
    out = tree_attention(*leaves, layout, attention="tree")
    assert (out - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


def test_the_choice_of_this_machine():
    """flash-attention 3 on a Hopper that has it, then 4, then 2, then what torch carries."""
    preferred = next(name for name in PREFERRED_ON_CUDA if name in INSTALLED)
    assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 128).kernel == preferred
