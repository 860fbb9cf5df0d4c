"""The kernels on a CUDA device: `make test-gpu`. What runs without one is in test_flash_signature.py."""

import importlib.util
import re
from itertools import product

import numpy as np
import pytest
import torch

from radixtrain import build_prefix_plan, tree_attention
from radixtrain.attention import _kernel, choose_attention
from radixtrain.errors import UserError
from radixtrain.kernels.cudnn import CudnnKernel, cudnn_missing
from radixtrain.kernels.flash import TorchCUDAKernel, flash_3_missing
from radixtrain.kernels.looping import EagerKernel
from radixtrain.kernels.ragged import Ragged
from radixtrain.kernels.reference import tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book
from radixtrain.tree.layout import TreeLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs these: make test-gpu"),
]
CUDA = torch.device("cuda")
PACKAGES = [name for name in ("flash_attn", "flash_attn_3") if importlib.util.find_spec(name)]
if "flash_attn_3" in PACKAGES and flash_3_missing(CUDA):  # it is there, and this is no Hopper
    PACKAGES.remove("flash_attn_3")
# Two keys are enough here, so that cuDNN runs the calls of these tests that it can.
CUDNN = [] if cudnn_missing(CUDA) else ["cudnn"]
INSTALLED = ["torch", "eager", *PACKAGES, *CUDNN]


@pytest.fixture(autouse=True)
def cudnn_for_short_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _kernel.cache_clear()
    monkeypatch.setattr(CudnnKernel.__init__, "__defaults__", (2,))


def nested_plan():
    """A prompt, two branches of it, leaves on both: several segments on one level."""
    rng = np.random.default_rng(0)
    prompt, left, right = (rng.integers(0, 1000, length) for length in (200, 60, 40))
    leaves = [np.concatenate([prompt, branch, rng.integers(0, 1000, 30)]) for branch in (left, right) for _ in range(3)]
    return build_prefix_plan(np.concatenate(leaves), np.cumsum([0] + [len(leaf) for leaf in leaves]))


def gradients(out, inputs, dout):
    return [out, *torch.autograd.grad(out, inputs, dout)]


TREE = [("tree", "auto")] if importlib.util.find_spec("triton") else []


@pytest.mark.parametrize(("attention", "kernel"), [*product(("cascade", "path", "expand"), INSTALLED), *TREE])
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


MODIFIERS = {
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


def modified_gradients(attend, tensors, dout, sinks):
    leaves = [x.detach().requires_grad_() for x in tensors]
    own = [sinks.detach().requires_grad_()] if sinks is not None else []
    out = attend(*leaves, **({"sinks": own[0]} if own else {}))
    return [out.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(out, [*leaves, *own], dout))]


@pytest.mark.parametrize("kernel", INSTALLED)
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
@pytest.mark.parametrize("modifiers", MODIFIERS.values(), ids=MODIFIERS)
def test_modifiers_in_bfloat16(attention, kernel, modifiers):
    plan = nested_plan()
    options = {name: value for name, value in modifiers.items() if name != "sinks"}
    asked = {name: name in options for name in ("softcap", "window")}
    try:
        choose_attention(attention, kernel, torch.device("cuda"), torch.bfloat16, 64, **asked)
    except ValueError:
        return  # refused with a reason, which test_attention.py reads
    generator = torch.Generator().manual_seed(0)
    shapes = [(plan.num_rows, heads, 64) for heads in (8, 2, 2, 8)]
    *inputs, dout = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    sinks = torch.linspace(-1, 3, 8).bfloat16() if "sinks" in modifiers else None

    def tree(q, k, v, **given):
        return tree_attention(q, k, v, plan, attention=attention, kernel=kernel, **options, **given)

    def exact(q, k, v, **given):
        return plain(q, k, v, plan, **options, **given)

    cuda_sinks, wide_sinks = (None, None) if sinks is None else (sinks.cuda(), sinks.double())
    actual = modified_gradients(tree, [x.cuda() for x in inputs], dout.cuda(), cuda_sinks)
    truth = modified_gradients(exact, [x.double() for x in inputs], dout.double(), wide_sinks)
    reference = modified_gradients(exact, inputs, dout, sinks)
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


@pytest.mark.parametrize("name", [name for name in INSTALLED if name != "eager"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_against_the_specification(name, heads, head_dim):
    """One call, with the merged out and lse of another: bottom-right causal, grouped heads, entries without queries."""
    kernel, ragged, scoring = varlen_kernel(name, CUDA), ragged_call(), Scoring(head_dim**-0.5)
    q, dout, other = (rows(171, heads[0], head_dim, seed=n) for n in range(3))
    k, v = (rows(302, heads[1], head_dim, seed=n) for n in (3, 4))
    actual, expected = [], []
    for each, results in ((kernel, actual), (EagerKernel(), expected)):
        out, lse = each.forward(q, k, v, ragged, scoring)
        merged = (out + other) / 2, lse + 0.7  # as after a merge with a piece of as much weight
        results += [out, lse, *each.backward(dout, q, k, v, *merged, ragged, scoring)]
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()
    assert not actual[3][:64].any() and not actual[4][:64].any(), "keys that no query sees"


# Entries, queries and keys of each, causal. Lengths on both sides of a tile, of a padded length and of 128 x n + 64.
OF_ONE_SHAPE = [
    *((1, 1000, 600, False), (1, 64, 2, False), (1, 1, 300, False), (3, 130, 70, False), (1, 1024, 704, False)),
    *((1, 700, 700, True), (4, 65, 65, True), (1, 64, 64, True)),
]


@pytest.mark.skipif(not CUDNN, reason="with cuDNN 9.10 and compute capability 8.0 this runs")
@pytest.mark.parametrize(("number", "queries", "keys", "causal"), OF_ONE_SHAPE)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shift", [0.0, -120.0])
def test_cudnn_on_calls_of_one_shape(monkeypatch, number, queries, keys, causal, heads, head_dim, shift):
    """cuDNN itself runs them.

    With a shift every score is about -120. With a mask, keys that pad a tile have given exp(0 - lse), and NaN in dq
    (pytorch/pytorch#196678); no mask is passed here.
    """
    for direction in ("forward", "backward"):
        monkeypatch.setattr(TorchCUDAKernel, direction, lambda *_: pytest.fail("flash attention ran"))
    bounds = [torch.arange(number + 1, dtype=torch.int32, device=CUDA) * length for length in (queries, keys)]
    ragged, scoring = Ragged(*bounds, queries, keys, causal), Scoring(head_dim**-0.5)
    q, dout, other = (rows(number * queries, heads[0], head_dim, seed=n) for n in range(3))
    k, v = (rows(number * keys, heads[1], head_dim, seed=n) for n in (3, 4))
    if shift:  # one axis of its own, so that every product gets the same amount
        q[..., 0], k[..., 0] = 16.0, shift * head_dim**0.5 / 16.0
    actual, expected = [], []
    for each, results in ((varlen_kernel("cudnn", CUDA), actual), (EagerKernel(), expected)):
        out, lse = each.forward(q, k, v, ragged, scoring)
        results += [out, lse, *each.backward(dout, q, k, v, (out + other) / 2, lse + 0.7, ragged, scoring)]
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()


@pytest.mark.skipif(not PACKAGES, reason="with flash-attn or flash-attn-3 installed this runs")
@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_the_same_bits_every_time(name, attention):
    """A backward in a fixed order. Builds of flash-attn-3 from before September 2025 have none."""
    plan = nested_plan()
    *inputs, dout = (rows(plan.num_rows, heads, 128, seed=heads) for heads in (8, 2, 2, 8))
    leaves = [x.requires_grad_() for x in inputs]
    runs = [gradients(tree_attention(*leaves, plan, attention=attention, kernel=name), leaves, dout) for _ in range(20)]
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
    """flash-attention 3 on a Hopper that has it, then 2, then what torch carries."""
    preferred = next(name for name in ("flash_attn_3", "flash_attn", "torch") if name in INSTALLED)
    assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 128).kernel == preferred
