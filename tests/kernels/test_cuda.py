"""The kernels on a CUDA device: `make test-gpu`. What runs without one is in test_flash.py."""

import importlib.util
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from radixtrain import build_prefix_plan, tree_attention
from radixtrain.attention import PREFERRED_ON_CUDA, choose_attention
from radixtrain.errors import UserError
from radixtrain.kernels import efficient
from radixtrain.kernels.cpu_loops import EagerKernel
from radixtrain.kernels.flash import cudnn_missing
from radixtrain.kernels.varlen import PACKAGES, package_missing, varlen_kernel
from radixtrain.kernels.varlen_args import Scoring
from radixtrain.testing import assert_within_reference_error
from radixtrain.tree.layout import TreeLayout
from tests.kernels.ragged_calls import ragged
from tests.support.batches import NAMES, attention_inputs, by_the_book, distances_of_plan, one_softmax, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs these: make test-gpu"),
]
CUDA = torch.device("cuda")
INSTALLED_PACKAGES = [name for name in PACKAGES if package_missing(name, CUDA) is None]
BAR = 5 * 2**-8  # both round to bfloat16 what they have added up of rounded weights: 2 ** -9 of a number each time
INSTALLED = ["torch", "efficient", *([] if cudnn_missing(CUDA) else ["cudnn"]), *INSTALLED_PACKAGES, "eager"]


def nested_plan():
    """A prompt, two branches of it, leaves on both: several chains hang on a chain."""
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


def on_host(tensors):
    return [x.detach().cpu() for x in tensors]


@pytest.mark.parametrize("modifiers", MODIFIERS.values(), ids=MODIFIERS)
@pytest.mark.parametrize(("attention", "kernel"), [*product(("cascade", "path", "expand"), INSTALLED), *TREE])
def test_strategies_in_bfloat16(attention, kernel, modifiers):
    """As near to float64 as by the book; with modifiers, as the formula in bfloat16."""
    plan, options = nested_plan(), {name: value for name, value in modifiers.items() if name != "sinks"}
    asked = {name: name in modifiers for name in ("softcap", "window")}
    try:
        choose_attention(attention, kernel, CUDA, torch.bfloat16, 64, **asked)
    except UserError:
        return  # refused with a reason, which test_attention.py reads
    tensors = attention_inputs(plan, torch.bfloat16, (8, 2), 64)
    sinks = [torch.linspace(-1, 3, 8).bfloat16()] * ("sinks" in modifiers)
    tree = partial(tree_attention, plan=plan, attention=attention, kernel=kernel, **options)
    formula = partial(one_softmax, distances=distances_of_plan(plan), **options)

    def attend(q, k, v, *sinks):
        return tree(q, k, v, sinks=sinks[0] if sinks else None)

    actual = on_host(with_gradients(attend, [x.cuda() for x in tensors], *(x.cuda() for x in sinks)))
    truth = with_gradients(formula, [x.double() for x in tensors], *(x.double() for x in sinks))
    reference = with_gradients(formula, tensors, *sinks)
    if not modifiers:
        reference = by_the_book(tensors, distances_of_plan(plan), 64**-0.5)
    assert_within_reference_error(actual[:4], reference[:4], truth[:4], names=NAMES)
    if sinks:  # eight numbers: too few for luck to average out, so one rounding of each is let through
        assert (actual[4] - truth[4]).norm() <= 2 * (reference[4] - truth[4]).norm() + 2**-8 * truth[4].norm()


def rows(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


# Lengths of queries and of keys. RAGGED: two entries without queries, one of a single query. DENSE: a call of cascade.
RAGGED = [0, 100, 0, 1, 70], [64, 130, 5, 33, 70]
DENSE, ONE_SEQUENCE, EQUAL = ([300], [190]), ([190], [190]), ([70] * 3, [70] * 3)


def in_both_directions(kernel, call, scoring, heads, head_dim, dtype):
    """out, lse, dq, dk, dv, with the out and lse of a merge with a piece of as much weight. Numbers of bfloat16."""
    num_queries, num_keys = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_k[-1])
    q, dout, other = (rows(num_queries, heads[0], head_dim, seed=n).to(dtype) for n in range(3))
    k, v = (rows(num_keys, heads[1], head_dim, seed=n).to(dtype) for n in (3, 4))
    out, lse = kernel.forward(q, k, v, call, scoring)
    grads = kernel.backward(dout, q, k, v, (out + other) / 2, lse + 0.7, call, scoring)
    return [out, lse, *grads]


def assert_like_the_specification(kernel, lengths, causal, heads, head_dim):
    """In bfloat16. Returns dk and dv too."""
    call = ragged(*lengths, causal, CUDA), Scoring(head_dim**-0.5), heads, head_dim, torch.bfloat16
    found = [in_both_directions(each, *call) for each in (kernel, EagerKernel())]
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine.float() - theirs.float()).norm() <= BAR * theirs.float().norm()
    return found[0][3:]


@pytest.mark.parametrize("name", [name for name in INSTALLED if name != "eager"])
def test_kernels_against_the_specification(name):
    """Bottom-right causal, grouped heads, entries without queries; one entry, everything seen and causal."""
    wider = [512, 20] if name == "efficient" else []
    for heads, head_dim in product([(4, 4), (8, 2), (4, 1)], [64, 128, *wider]):
        kernel = varlen_kernel(name, CUDA)
        dk, dv = assert_like_the_specification(kernel, RAGGED, True, heads, head_dim)
        assert not dk[:64].any() and not dv[:64].any(), "keys that no query sees"
        assert_like_the_specification(kernel, DENSE, False, heads, head_dim)
        for lengths in (ONE_SEQUENCE, EQUAL):
            assert_like_the_specification(kernel, lengths, True, heads, head_dim)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 512, 17])
def test_efficient_in_float32(monkeypatch, head_dim, window):
    """As near to float64 as matmuls in float32; entries all at once, and one a call."""
    calls = [(lengths, True) for lengths in (RAGGED, ONE_SEQUENCE)] + [(DENSE, False)] * (window is None)
    for (lengths, causal), workspace in product(calls, (2**30, 1)):
        monkeypatch.setattr(efficient, "WORKSPACE", workspace)
        call = ragged(*lengths, causal, CUDA), Scoring(head_dim**-0.5, window=window), (4, 2), head_dim
        truth = in_both_directions(EagerKernel(), *call, torch.float64)
        ordinary = in_both_directions(EagerKernel(), *call, torch.float32)
        actual = in_both_directions(varlen_kernel("efficient", CUDA), *call, torch.float32)
        assert_within_reference_error(actual, ordinary, truth, names=("out", "lse", "dq", "dk", "dv"))


@pytest.mark.skipif(not INSTALLED_PACKAGES, reason="with flash-attn, flash-attn-3 or flash-attn-4 installed this runs")
@pytest.mark.parametrize("name", INSTALLED_PACKAGES)
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_the_same_bits_every_time(name, attention):
    """A backward in a fixed order. Builds of flash-attn-3 from before September 2025 have none."""
    plan = nested_plan()
    tensors = [x.cuda() for x in attention_inputs(plan, torch.bfloat16, (8, 2), 128)]
    tree = partial(tree_attention, plan=plan, attention=attention, kernel=name)
    runs = [with_gradients(tree, tensors) for _ in range(20)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@pytest.mark.skipif(not TREE, reason="with triton installed this runs")
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (256, torch.float16), (80, torch.float32)])
def test_tree_of_other_sizes(head_dim, dtype):
    """Also of fewer rows than a block of the mask has."""
    for plan in (nested_plan(), build_prefix_plan([*range(40), *range(30), 99], [0, 40, 71])):
        tensors, distances = attention_inputs(plan, dtype, (8, 2), head_dim), distances_of_plan(plan)
        tree = partial(tree_attention, plan=plan, attention="tree")
        found = on_host(with_gradients(tree, [x.cuda() for x in tensors]))
        reference, truth = (
            by_the_book(given, distances, head_dim**-0.5) for given in (tensors, [x.double() for x in tensors])
        )
        assert_within_reference_error(found, reference, truth, names=NAMES)


@pytest.mark.skipif(not TREE, reason="with triton installed this runs")
def test_tree_waits_for_nothing():
    """In both directions, its mask included; the first call compiles."""
    leaves = [rows(nested_plan().num_rows, heads, 64).requires_grad_() for heads in (8, 2, 2)]
    dout = torch.ones_like(leaves[0])
    for mode in ("default", "error"):
        layout = TreeLayout.from_plan(nested_plan()).to(CUDA)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            torch.autograd.grad(tree_attention(*leaves, layout, attention="tree"), leaves, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_choice_of_this_machine():
    """flash-attention 3 on a Hopper that has it, then 4, then 2, then what torch carries."""
    preferred = next(name for name in PREFERRED_ON_CUDA if name in INSTALLED)
    assert choose_attention("auto", "auto", CUDA, torch.bfloat16, 128).kernel == preferred
