"""`attention="tree"`: by request only, exact, and refused by name if it cannot run. U rows, N heads, H head dim."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import NESTED, attention_inputs, longer, plan_of
from tiers import FULL, tries
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="pip install triton runs it")

from radixtrain import RadixCollator, attention, prepare_model, tree_attention, verify_equivalence
from radixtrain.attention import choose_attention
from radixtrain.errors import UserError
from radixtrain.kernels.reference import tree_mask
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, ragged_batches
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

pytestmark = [
    FULL,
    pytest.mark.skipif(torch.cuda.is_available(), reason="these are for the CPU; on CUDA tests/kernels/test_cuda.py"),
]
NAMES = ("out", "dq", "dk", "dv")


def with_gradients(tree: PrefixPlan | TreeLayout, tensors: list[Tensor], strategy: str, **options) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = tree_attention(*leaves, tree, attention=strategy, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def test_chosen_by_request_only() -> None:
    choice = choose_attention("tree", "auto", torch.device("cpu"), torch.float32, 64)
    assert choice[:2] == ("tree", "triton") and "by request" in choice.reason


def test_lower_precision() -> None:
    """About as near to float64 as flash-attention's arithmetic in the same dtype, with tiles of several sizes."""
    plan = plan_of(longer(NESTED, 10), min_shared_tokens=20)
    mask = tree_mask(TreeLayout.from_plan(plan).row_subtree_ends)
    for dtype, tiles in ((torch.float32, (32, 32)), (torch.float16, (16, 32)), (torch.float32, None)):
        tensors = attention_inputs(plan, dtype, head_dim=16)
        truth = with_gradients(plan, [x.double() for x in tensors], "reference")
        out, _, *grads = flash_attention_by_the_book(*tensors, mask, 16**-0.5)
        layout = TreeLayout.from_batch(TreeLayout.from_plan(plan, tiles=tiles).to_batch())
        actual = with_gradients(layout, tensors, "tree")
        assert_within_reference_error(actual, [out, *grads], truth, names=NAMES)


@settings(max_examples=tries(15, 10_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sequences=ragged_batches(min_length=0), pad_to_multiple_of=st.sampled_from([None, 8]))
def test_generated(sequences: list[list[int]], pad_to_multiple_of: int | None) -> None:
    plan = plan_of([*sequences, [3] * 4], pad_to_multiple_of=pad_to_multiple_of)
    tensors = attention_inputs(plan, torch.float32, (2, 1), 4)
    truth = with_gradients(plan, [x.double() for x in tensors], "reference", scale=0.7)
    for name, x, exact in zip(NAMES, with_gradients(plan, tensors, "tree", scale=0.7), truth, strict=True):
        rows = slice(plan.num_unique_tokens)
        # one bar for every try, small as they are: sums of at most a hundred terms of order one
        assert (x[rows] - exact[rows]).abs().max() <= 100 * torch.finfo(torch.float32).eps, name


def test_no_rows() -> None:
    plan = plan_of([])
    assert [len(x) for x in with_gradients(plan, attention_inputs(plan, torch.float32), "tree")] == [0] * 4


def attend(dtype: torch.dtype = torch.float32, head_dim: int = 8, **options) -> Tensor:
    plan = plan_of(NESTED)
    return tree_attention(*attention_inputs(plan, dtype, head_dim=head_dim)[:3], plan, attention="tree", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 1.0}, "computes no soft-cap; attention='auto' takes what"),
        ({"window": 2}, "computes no sliding window, and one is shorter than the batch's longest sequence"),
        ({"sinks": torch.zeros(4)}, "computes no sinks"),
        ({"dtype": torch.float64}, "takes bfloat16, float16, float32, got torch.float64"),
        ({"head_dim": 257}, "takes head dims up to 256, got 257"),
        ({"dtype": torch.bfloat16}, "runs on a CPU under Triton's interpreter, which gets bfloat16 wrong"),
        ({"kernel": "torch"}, "attention='tree' has a kernel of its own"),
    ],
)
def test_what_it_does_not_take(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"='(tree|torch)' cannot be used: {message}"):
        attend(**options)


def test_a_machine_that_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for lacks, message in (
        (lambda: monkeypatch.delenv("TRITON_INTERPRET"), r"Triton needs CUDA, the tensors are on cpu \(TRITON_INT"),
        (lambda: monkeypatch.setattr("importlib.util.find_spec", lambda name: None), "Triton is not installed "),
    ):
        attention._choice.cache_clear()
        lacks()
        with pytest.raises(UserError, match=f"attention='tree' cannot be used: {message}"):
            attend()
    attention._choice.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "sizes"),
    [(torch.bfloat16, 128, (128, 64)), (torch.float16, 192, (64, 16)), (torch.float32, 8, (32, 16))],
)
def test_a_device_without_tiles_says_how_to_ask_for_them(
    dtype: torch.dtype, head_dim: int, sizes: tuple[int, int]
) -> None:
    """And with tiles too large for it. Torch's meta device, whose values cannot be read, stands in for CUDA."""
    q = torch.zeros(plan_of(NESTED).num_rows, 2, head_dim, dtype=dtype, device="meta")
    asked = rf"RadixCollator\(tree_tiles=\({sizes[0]}, {sizes[1]}\)\)"
    with pytest.raises(UserError, match=f"attention='tree' needs the lists of tiles in the batch, .* {asked}, or"):
        tree_attention(q, q, q, TreeLayout.from_plan(plan_of(NESTED)).to("meta"), attention="tree")
    large = TreeLayout.from_plan(plan_of(NESTED), tiles=(128, 128)).to("meta")
    with pytest.raises(UserError, match=rf"takes tiles of up to .* the batch has \(128, 128\): set {asked}"):
        tree_attention(q, q, q, large, attention="tree")
    fitting = TreeLayout.from_plan(plan_of(NESTED), tiles=sizes).to("meta")
    assert tree_attention(q, q, q, fitting, attention="tree").shape == q.shape


@pytest.mark.parametrize("collator", [RadixCollator(tree_tiles=True), RadixCollator()], ids=["tiles", "none"])
def test_a_model(tiny_qwen3: Callable[..., Any], collator: RadixCollator) -> None:
    """Every gradient of a tiny Qwen3, against ordinary Hugging Face. On a CPU tiles may be missing."""
    features = [{"input_ids": ids, "labels": ids} for ids in longer(NESTED, 2)[:4]]
    report = verify_equivalence(tiny_qwen3(), features, attention="tree", collator=collator, precisions=["float32"])
    assert report.passed, str(report)


def test_a_model_on_a_device_says_how_to_ask_for_tiles(
    tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a model runs it: without tiles, no layer takes another strategy instead."""
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: device != ("meta",) and is_enabled(*device))
    model = prepare_model(tiny_qwen3().to(torch.bfloat16).to("meta"), attention="tree")
    batch = RadixCollator()([{"input_ids": ids, "labels": ids} for ids in NESTED])
    batch = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in batch.items()}
    with pytest.raises(UserError, match=r"layer 0.*: attention='tree' needs .* RadixCollator\(tree_tiles=\(128, 64"):
        model(**batch)
