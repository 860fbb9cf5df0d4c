"""U unique rows, N query heads, K key/value heads, H head dim."""

import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixtrain import attention as attention_module
from radixtrain.attention import EVERYWHERE, PREFERRED_ON_CUDA, choose_attention, tree_attention
from radixtrain.errors import UserError
from radixtrain.kernels.cpu_loops import EagerKernel
from radixtrain.kernels.varlen import ON_CUDA, PACKAGES
from radixtrain.testing import assert_within_reference_error, ragged_batches
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from tests.support import FULL, cases, tries
from tests.support.batches import (
    NAMES,
    NESTED,
    assert_exact,
    attention_inputs,
    by_the_book,
    distances_of_plan,
    longer,
    one_softmax,
    plan_of,
    with_gradients,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WAYS = [(strategy, kernel) for strategy in ("cascade", "path", "expand") for kernel in ("torch", "eager")]
EVERY_WAY = [*WAYS, ("reference", "auto"), ("auto", "auto")]

LONGEST = 12  # tokens of the longest sequence of NESTED with every run twice as long, and of generated batches
MODIFIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 0.8},
    "window of 1": {"window": 1},
    "window of 2": {"window": 2},
    "window of 3": {"window": 3},
    "a window that just binds": {"window": LONGEST - 1},
    "a window that does not bind": {"window": LONGEST},
    "window and sinks": {"window": 3, "sinks": True},
    "soft-cap and window": {"softcap": 0.8, "window": 3},
    "all": {"scale": 0.3, "softcap": 0.8, "window": 2, "sinks": True},
}


def ways_of(modifiers: dict[str, Any], longest: int = LONGEST) -> list[tuple[str, str]]:
    """The strategies and kernels that compute these modifiers, of a batch whose longest sequence has `longest`."""
    binds = modifiers.get("window", longest) < longest
    ways = [way for way in EVERY_WAY if not (binds and way[0] == "cascade")]
    return [way for way in ways if way[1] != "torch"] if "softcap" in modifiers else ways


def sinks_of(modifiers: dict[str, Any], num_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.linspace(-1, 2, num_heads, dtype=torch.float64).to(dtype)] * ("sinks" in modifiers)


def by_tree(plan: PrefixPlan, tensors: list[Tensor], attention: str, kernel: str = "auto", **modifiers) -> list[Tensor]:
    options = {name: value for name, value in modifiers.items() if name != "sinks"}

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        given = {**options, "sinks": sinks[0] if sinks else None}
        return tree_attention(q, k, v, plan, attention=attention, kernel=kernel, **given)

    return with_gradients(attend, tensors, *sinks_of(modifiers, tensors[0].shape[1], tensors[0].dtype))


def by_softmax(plan: PrefixPlan, tensors: list[Tensor], **modifiers) -> list[Tensor]:
    """No tree and no kernel: each row sees the rows before it in its sequences."""
    options = {name: value for name, value in modifiers.items() if name != "sinks"}
    attend = partial(one_softmax, distances=distances_of_plan(plan), **options)
    return with_gradients(attend, tensors, *sinks_of(modifiers, tensors[0].shape[1], tensors[0].dtype))


def assert_ways_are_exact(plan: PrefixPlan, tensors: list[Tensor], modifiers: dict[str, Any]) -> None:
    truth = by_softmax(plan, tensors, **modifiers)
    for way in ways_of(modifiers, int(np.diff(plan.cu_seqlens).max())):
        assert_exact(by_tree(plan, tensors, *way, **modifiers), truth, (way, modifiers))


@pytest.mark.parametrize("name", MODIFIERS)
def test_nested_in_float64(name: str) -> None:
    nested, apart = longer(NESTED, 2), [[n, n + 1, *range(40, 52)] for n in (5, 3, 9)]
    cases = [
        (nested, {}, (2, 2)),
        (nested, {"min_shared_tokens": 3}, (4, 1)),
        (nested, {"pad_to_multiple_of": 16}, (4, 2)),
    ]
    for sequences, options, heads in [*cases, (apart, {}, (4, 2))]:
        plan = plan_of(sequences, **options)
        assert_ways_are_exact(plan, attention_inputs(plan, torch.float64, heads), MODIFIERS[name])


@settings(max_examples=tries(250, 10_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sequences=ragged_batches(min_length=0, max_length=LONGEST),
    min_shared_tokens=st.sampled_from([1, 3]),
    pad_to_multiple_of=st.sampled_from([None, 8]),
    name=st.sampled_from(sorted(MODIFIERS)),
)
def test_generated_in_float64(
    sequences: list[list[int]], min_shared_tokens: int, pad_to_multiple_of: int | None, name: str
) -> None:
    """One sequence is as long as can be: windows bind, and some query has two keys, or gradients were zero."""
    sequences = [*sequences, [0, 1, 2, 3] * (LONGEST // 4)]
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    assert_ways_are_exact(plan, attention_inputs(plan, torch.float64, (2, 1), 4), MODIFIERS[name])


IN_BFLOAT16 = [(name, torch.bfloat16) for name in MODIFIERS if name not in ("none", "scale")]
ROUNDED = [*(("none", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)), *IN_BFLOAT16]


@pytest.mark.parametrize(("name", "dtype"), cases(ROUNDED, [*ROUNDED[:3], ("all", torch.bfloat16)]))
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    """About as near to float64 as flash-attention's arithmetic in the same dtype, or with modifiers as one softmax.

    Windows as much wider as the sequences are longer, so that there are keys enough to average out luck.
    """
    modifiers = dict(MODIFIERS[name])
    if "window" in modifiers:
        modifiers["window"] = 60 if modifiers["window"] == LONGEST else min(50, 10 * modifiers["window"])
    for options in ({}, {"min_shared_tokens": 20, "pad_to_multiple_of": 64}):
        plan = plan_of(longer(NESTED, 10), **options)
        tensors = attention_inputs(plan, dtype, head_dim=16)
        truth = by_softmax(plan, [x.double() for x in tensors], **modifiers)
        reference = by_softmax(plan, tensors, **modifiers)
        if not modifiers:
            reference = by_the_book(tensors, distances_of_plan(plan), 16**-0.5)
        for way in ways_of(modifiers, 60):
            actual = by_tree(plan, tensors, *way, **modifiers)
            assert [x.dtype for x in actual] == [dtype] * len(actual)
            assert_within_reference_error(actual[:4], reference[:4], truth[:4], names=NAMES)


@pytest.mark.parametrize("sequences", [[], [[], []]])
def test_no_rows(sequences: list[list[int]]) -> None:
    plan, shapes = plan_of(sequences), [(0, 4, 8), (0, 4, 8), (0, 2, 8), (0, 2, 8)]
    tensors = attention_inputs(plan, torch.float32)
    for way in EVERY_WAY:
        assert [x.shape for x in by_tree(plan, tensors, *way)] == shapes, way
    for attention in EVERYWHERE:
        results = by_tree(plan, tensors, attention, sinks=True, window=1)
        assert [x.shape for x in results] == [*shapes, (4,)] and not results[-1].any(), attention


@FULL
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_same_bits_every_time(attention: str) -> None:
    plan = plan_of(longer(NESTED, 10))
    tensors = attention_inputs(plan, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for kernel in ("torch", "eager"):
            first, *others = (by_tree(plan, tensors, attention, kernel) for _ in range(5))
            assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True)), kernel
    finally:
        torch.set_num_threads(threads)


def test_window_counts_tokens_not_positions() -> None:
    """Positions that jump, as after a dropped span, do not change who is near."""
    tokens = [1, 1, 2, 2, 3, 1, 1, 2, 2, 4]
    jumping = build_prefix_plan(tokens, [0, 5, 10], position_ids=[0, 1, 50, 51, 52] * 2)
    assert_ways_are_exact(jumping, attention_inputs(jumping, torch.float64), {"window": 3})


ROWS = plan_of(NESTED).num_rows
GOOD = torch.zeros(ROWS, 2, 8)
NARROW, SHORT, FOUR_AXES = GOOD[..., :4], GOOD[1:], GOOD[None]
FIT = {"query": GOOD, "key": GOOD, "value": GOOD}


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        *(({name: SHORT}, {}, rf"{name} must be \(U, heads, head_dim\) with U = {ROWS} rows, .*; got \({ROWS - 1}, 2")
          for name in FIT),
        ({"query": FOUR_AXES}, {}, rf"query must be .* got \(1, {ROWS}, 2, 8\)"),
        ({"query": torch.zeros(ROWS, 3, 8)}, {}, "must be a multiple of those of key and value: got 3, 2 and 2"),
        ({"value": GOOD[:, :1]}, {}, "must be a multiple of those of key and value: got 2, 2 and 1"),
        ({"key": NARROW}, {}, "head_dim must agree, got 8, 4 and 8"),
        ({"value": NARROW}, {}, "head_dim must agree, got 8, 8 and 4"),
        ({}, {"softcap": 0.0}, "softcap must be positive, or None for no soft-cap; got 0.0"),
        ({}, {"window": 0}, r"window must be at least 1 \(a query sees itself\), or None for no window; got 0"),
        ({}, {"sinks": torch.zeros(3)}, r"sinks must be \(2,\), one floating-point logit for each .* got \(3,"),
        ({}, {"sinks": torch.zeros(2, dtype=torch.int64)}, r"sinks must be .* torch\.int64"),
        ({}, {"sinks": torch.zeros(2, device="meta")}, "sinks are on meta, query on cpu"),
        ({}, {"window": 2, "attention": "cascade"}, "'cascade' cannot be used: .* attention='auto' or 'path' keeps"),
        ({}, {"softcap": 1.0, "kernel": "torch"}, "kernel='torch' cannot be used: computes no soft-cap; kernel='auto'"),
        ({}, {"kernel": "flash_attn"}, "kernel='flash_attn' cannot be used: needs CUDA, the tensors are on cpu"),
        ({"value": GOOD.bfloat16()}, {}, r"value is torch\.bfloat16 on cpu, query is torch\.float32 on cpu"),
        (dict.fromkeys(FIT, GOOD.long()), {}, r"torch\.int64"),
        ({"key": GOOD.to("meta")}, {}, r"key is torch\.float32 on meta, query is torch\.float32 on cpu"),
        (dict.fromkeys(FIT, GOOD.to("meta")), {}, r"the plan is on cpu, query on meta; move it with TreeLayout\.to"),
    ],
)  # fmt: skip
def test_what_does_not_fit(changed: dict[str, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_attention(*{**FIT, **changed}.values(), TreeLayout.from_plan(plan_of(NESTED)), **options)


BF16, F16, F32, SOFTCAP, WINDOW = torch.bfloat16, torch.float16, torch.float32, {"softcap": True}, {"window": True}
NARROW_HEADS = "takes head dims that are multiples of 8 up to"
TWO, THREE, FOUR = "flash-attn 2.8.3", "flash-attn-3 3.0.0", "flash-attn-4 4.0.0b36"


def install(monkeypatch: pytest.MonkeyPatch, site: Path, package: str) -> None:
    """As pip does, for what looks for versions; its kernel can be made."""
    name, version = package.split()
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    kernel = next(kernel for kernel, package in PACKAGES.items() if package.name == name)
    monkeypatch.setitem(ON_CUDA, kernel, EagerKernel)


class TestChoice:
    @pytest.fixture(autouse=True)
    def nothing_chosen_yet(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """And nothing that a made-up machine ran is remembered afterwards."""
        choose_attention.cache_clear()
        monkeypatch.setattr(attention_module, "_LOGGED", set())
        yield
        choose_attention.cache_clear()

    @pytest.mark.parametrize(
        ("asked", "modifiers", "expected"),
        [  # asked: attention, kernel, device, dtype, head dim. expected: strategy, kernel, what the reason says
            *((("auto", "auto", CPU, dtype, 17), {}, ("cascade", "torch", "no row is copied; torch: on cpu"))
              for dtype in (torch.float64, F32, BF16)),
            (("path", "eager", CPU, F32, 64), {}, ("path", "eager", "path: as chosen; eager: as chosen")),
            (("reference", "auto", CPU, F32, 64), {}, ("reference", "eager", "explicit mask, by request")),
            (("auto", "auto", CPU, F32, 64), SOFTCAP, ("cascade", "eager", "torch computes no soft-cap")),
            (("auto", "auto", CPU, F32, 64), WINDOW, ("path", "torch", "binds, which cascade cannot keep")),
            (("expand", "auto", CPU, F32, 64), WINDOW, ("expand", "torch", "as chosen")),
            (("auto", "torch", CUDA, BF16, 64), WINDOW, ("path", "torch", "as chosen")),
        ],
    )  # fmt: skip
    def test_what_runs(self, asked: tuple, modifiers: dict, expected: tuple) -> None:
        choice = choose_attention(*asked, **modifiers)
        assert (choice.strategy, choice.kernel) == expected[:2] and expected[2] in choice.reason

    @pytest.mark.parametrize(
        ("packages", "capability", "dtype", "head_dim", "modifiers", "kernel", "why"),
        [  # why: something that the reason says
            ([], 9.0, BF16, 128, {}, "torch", "flash-attn-4 is not installed (pip install -U 'flash-attn-4>="),
            ([], 8.0, F16, 256, {}, "torch", "flash-attn is not installed (pip install -U 'flash-attn>=2.7', needs"),
            ([], 9.0, BF16, 64, SOFTCAP, "eager", "efficient computes no soft-cap"),
            ([], 9.0, torch.float64, 64, {}, "eager", "efficient takes float32, float16 and bfloat16, got torch.fl"),
            ([], 8.0, BF16, 64, WINDOW, "torch", "on cuda"),
            ([], 8.0, BF16, 17, {}, "efficient", f"torch {NARROW_HEADS} 256, got 17"),
            ([], 8.0, F32, 64, {}, "efficient", "torch takes float16 and bfloat16, got torch.float32"),
            ([TWO], 8.0, BF16, 128, {}, "flash_attn", "on cuda"),
            ([TWO], 9.0, F16, 256, SOFTCAP | WINDOW, "flash_attn", "flash-attn-4 is not installed"),
            ([TWO], 9.0, F32, 64, {}, "efficient", "flash_attn takes float16 and bfloat16, got torch.float32"),
            ([TWO], 8.0, BF16, 512, {}, "efficient", f"flash_attn {NARROW_HEADS} 256, got 512"),
            (["flash-attn 2.6.3"], 8.0, BF16, 64, {}, "torch", "2.6.3 is too old (pip install -U 'flash-attn>=2.7')"),
            ([THREE], 9.0, BF16, 192, SOFTCAP | WINDOW, "flash_attn_3", "on cuda"),
            ([THREE], 9.0, BF16, 256, {}, "torch", f"flash_attn_3 {NARROW_HEADS} 192"),
            ([THREE], 10.0, BF16, 128, {}, "torch", "needs a GPU of compute capability 9.x, this one has 10.0"),
            ([THREE], None, BF16, 128, {}, "torch", "compute capability 9.x, and torch sees no CUDA device"),
            ([FOUR], 9.0, BF16, 128, {}, "flash_attn_4", "on cuda"),
            ([FOUR], 12.0, BF16, 64, SOFTCAP, "eager", "capability 9.x or 10.x or 11.x, this one has 12.0"),
            ([FOUR], 10.0, F16, 128, SOFTCAP | WINDOW, "flash_attn_4", "on cuda"),
            ([FOUR], 10.0, BF16, 192, {}, "torch", f"flash_attn_4 {NARROW_HEADS} 128"),
            ([FOUR], 9.0, BF16, 512, {}, "efficient", f"flash_attn_4 {NARROW_HEADS} 256"),
            (["flash-attn-4 4.0.0b35"], 9.0, BF16, 64, {}, "torch", "b35 is too old (pip install -U 'flash-attn-4>=4"),
            (["flash-attn-4 4.0.0"], 9.0, BF16, 64, {}, "flash_attn_4", "on cuda"),
            ([TWO, FOUR], 8.0, BF16, 128, {}, "flash_attn", "flash_attn_4 needs a GPU of"),
            ([TWO, THREE, FOUR], 9.0, BF16, 128, {}, "flash_attn_3", "on cuda"),
            ([TWO, THREE, FOUR], 9.0, BF16, 256, {}, "flash_attn_4", f"flash_attn_3 {NARROW_HEADS} 192"),
        ],
    )  # fmt: skip
    def test_kernel_of_a_machine(
        self, monkeypatch, tmp_path, packages, capability, dtype, head_dim, modifiers, kernel, why
    ) -> None:
        """What `auto` takes on CUDA, and whether that is a loop. What it passes over is refused by name too."""
        for package in packages:
            install(monkeypatch, tmp_path, package)
        monkeypatch.setattr("sys.path", [str(tmp_path)])
        monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
        major, minor = divmod(round(10 * (capability or 0)), 10)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, minor))
        choice = choose_attention("auto", "auto", CUDA, dtype, head_dim, **modifiers)
        assert choice.kernel == kernel and why in choice.reason, choice
        assert choice.is_slow == ("eager is a loop of matrix products" in choice.reason) == (kernel == "eager")
        for name in PREFERRED_ON_CUDA[: PREFERRED_ON_CUDA.index(kernel)]:
            with pytest.raises(UserError, match=f"kernel='{name}' cannot be used: .*; kernel='auto' takes") as error:
                choose_attention("auto", name, CUDA, dtype, head_dim, **modifiers)
            refusal = str(error.value).partition(": ")[2].rpartition("; ")[0]
            assert f"{name} {refusal}" in choice.reason

    @pytest.mark.parametrize("error", [ImportError, OSError, AttributeError])
    def test_a_package_that_cannot_be_imported(self, monkeypatch, tmp_path, error: type[Exception]) -> None:
        """Such as one built for another torch, or half overwritten."""

        def broken() -> None:
            raise error("undefined symbol: _ZN3c10")

        install(monkeypatch, tmp_path, TWO)
        monkeypatch.setitem(ON_CUDA, "flash_attn", broken)
        monkeypatch.setattr("sys.path", [str(tmp_path)])
        refusal = (
            "the package flash-attn 2.8.3 cannot be imported: undefined symbol: _ZN3c10 "
            "(pip install --force-reinstall --no-deps flash-attn==2.8.3)"
        )
        choice = choose_attention("auto", "auto", CUDA, BF16, 64)
        assert choice.kernel == "torch" and f"flash_attn {refusal}" in choice.reason
        with pytest.raises(UserError, match=re.escape(f"kernel='flash_attn' cannot be used: {refusal}; ")):
            choose_attention("auto", "flash_attn", CUDA, BF16, 64)

    @pytest.mark.parametrize(
        ("asked", "modifiers", "message"),
        [  # asked: attention, kernel, device, dtype, head dim
            (("auto", "cudnn", CUDA, BF16, 64), {}, "needs a GPU of .* capability 9.x, and torch sees no CUDA device"),
            *((("auto", name, CUDA, BF16, 64), SOFTCAP, "computes no soft-cap")
              for name in ("torch", "cudnn", "efficient")),
            *((("auto", name, CPU, BF16, 64), {}, "needs CUDA, the tensors are on cpu")
              for name in ("cudnn", "efficient", "flash_attn_4")),
            (("tree", "auto", CPU, BF16, 64), {}, "FlexAttention computes gradients on CUDA only, the tensors are on"),
            (("tree", "auto", CUDA, torch.float64, 64), {}, "takes bfloat16, float16, float32, got torch.float64"),
            *((("tree", "auto", CUDA, BF16, dim), {}, f"head dims from 16 to 256, got {dim}") for dim in (8, 264)),
            (("tree", "auto", CUDA, BF16, 64), SOFTCAP, "computes no soft-cap"),
            (("tree", "torch", CUDA, BF16, 64), {}, "attention='tree' has its own kernel"),
        ],
    )  # fmt: skip
    def test_what_is_refused(self, monkeypatch, asked: tuple, modifiers: dict, message: str) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # triton
        attention, kernel, *_ = asked
        name = f"kernel='{kernel}'" if kernel != "auto" else f"attention='{attention}'"
        with pytest.raises(UserError, match=f"{name} cannot be used: .*{message}"):
            choose_attention(*asked, **modifiers)

    def test_tree_without_triton(self, monkeypatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        message = r"compiles with Triton, which is not .*\(pip install triton\); attention='auto' takes one that can"
        with pytest.raises(UserError, match=message):
            choose_attention("tree", "auto", CUDA, BF16, 64)

    def test_unknown_names(self) -> None:
        with pytest.raises(
            UserError, match="attention must be auto, cascade, path, expand, reference, tree; got 'flex'"
        ):
            choose_attention("flex", "auto", CPU, torch.float32, 64)
        kernels = "auto, torch, flash_attn, flash_attn_3, flash_attn_4, cudnn, efficient, eager"
        with pytest.raises(UserError, match=f"kernel must be {kernels}; got 'triton'"):
            choose_attention("auto", "triton", CPU, torch.float32, 64)

    def test_logged_once_in_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        """Also after more head dims than are remembered; a choice that nothing runs is not logged."""
        plan = plan_of(NESTED)
        with caplog.at_level(logging.INFO, logger="radixtrain.attention"):
            choose_attention("path", "auto", CPU, torch.float32, 64)
            q, k, v, _ = attention_inputs(plan, torch.float32)
            for head_dim in [*range(1, 100), *range(1, 100)]:
                tree_attention(*(x[..., :1].expand(-1, -1, head_dim) for x in (q, k, v)), plan)
        assert caplog.messages == ["attention=cascade, kernel=torch (cascade: no row is copied; torch: on cpu)"]

    def test_a_loop_on_a_gpu_is_a_warning(self, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
        slow = attention_module.AttentionChoice("cascade", "eager", "why", is_slow=True)
        monkeypatch.setattr(attention_module, "choose_attention", Mock(return_value=slow))
        plan = plan_of(NESTED)
        tree_attention(*attention_inputs(plan, torch.float32)[:3], plan)
        assert [(record.levelno, record.message) for record in caplog.records] == [(logging.WARNING, str(slow))]


@pytest.mark.parametrize(("kernel", "batches"), [("auto", 1), ("flash_attn_3", 0)])
def test_a_named_kernel_computes_rows_that_share_nothing_too(
    monkeypatch: pytest.MonkeyPatch, kernel: str, batches: int
) -> None:
    """Under `auto`, whatever it chose, sequences of one length are a batch for torch's own attention."""
    plan = plan_of([[1, 2, 3], [4, 5, 6]])
    q, k, v = (torch.randn(plan.num_rows, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = tree_attention(q, k, v, plan, attention="reference")
    ran = Mock(wraps=attention_module._batched_attention)
    monkeypatch.setattr(attention_module, "_batched_attention", ran)
    chosen = attention_module.AttentionChoice("cascade", "flash_attn_3", "")
    monkeypatch.setattr(attention_module, "_chosen", lambda *request: chosen)
    monkeypatch.setattr(attention_module, "_kernel", lambda name, device: EagerKernel())
    torch.testing.assert_close(tree_attention(q, k, v, plan, kernel=kernel), expected)
    assert ran.call_count == batches
