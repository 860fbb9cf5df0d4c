"""The CUDA code path without CUDA: the classes that call the GPU kernels, driven by stand-ins.

A stand-in takes the arguments of the real function in its order, checks what the real one checks before it starts (or
takes for granted, and reads wrong memory), and computes eagerly.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from strategies_on_cuda import by_reference, inputs, on_cuda, plan_of, with_gradients
from torch import Tensor

from radixtrain.kernels import flash
from radixtrain.kernels.flash import FlashAttn3Kernel, FlashAttnKernel, TorchCUDAKernel, flash_3_missing
from radixtrain.kernels.looping import EagerKernel
from radixtrain.kernels.ragged import Ragged, VarlenKernel
from radixtrain.kernels.reference import tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.testing import assert_within_reference_error, flash_attention_by_the_book, relative_error
from radixtrain.tree.layout import TreeLayout

NAMES = ("out", "dq", "dk", "dv")
HALF = (torch.bfloat16, torch.float16)
TRIES = {
    "one prompt": [[1, 1, 1, *tail] for tail in ([2], [3, 2], [1, 1, 4, 4])],
    "nested": [
        [1, 1, 2, 2, 3],
        [1, 1, 2, 2, 4, 4],
        [1, 1, 2, 5],
        [1, 1, 3, 3],
        [2, 2, 1],
        [2, 2, 3, 3],
        [2, 2, 3, 4],
        [5],
    ],
    "deep": [[1] * n + [2] for n in range(1, 7)],
    "branches of one token": [[1, 2], [1, 3], [1, 4], [2, 2], [2, 3]],
    "nothing shared": [[1, 2, 3], [2, 1], [3]],
    "one a prefix of another": [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [1, 2, 5]],
}


class FlashRules:
    """What a varlen flash kernel demands of its arguments (`mha_varlen_fwd` and `_bwd` in flash_api.cpp).

    Versions 2 and 3 demand the same, but for the widest head, which `kernels/refusals.py` checks.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...]):
        self.dtypes = dtypes
        self.num_forward = self.num_backward = 0
        self.seen: list[Scoring] = []

    def check_rows(self, *tensors: Tensor) -> None:
        for x in tensors:
            assert x.ndim == 3
            assert x.dtype == tensors[0].dtype and x.dtype in self.dtypes, f"got {x.dtype}"
            assert x.stride(-1) == 1, "must have contiguous last dimension"
            assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, f"head_size {x.shape[-1]}"
            steps = [
                x.storage_offset(),
                *(step for step, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1),
            ]
            assert not any(step % 8 for step in steps), "rows and heads must start at multiples of 16 bytes"

    def ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        windowed: bool,
    ) -> Ragged:
        assert k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
        assert type(causal) is bool
        for rows, cu_seqlens, longest in ((q, cu_seqlens_q, max_q), (k, cu_seqlens_k, max_k)):
            assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and cu_seqlens.ndim == 1
            assert cu_seqlens[0] == 0 and cu_seqlens[-1] == len(rows)
            lengths = cu_seqlens.diff()
            assert lengths.min() >= 0 and type(longest) is int and longest == lengths.max()
        assert cu_seqlens_q.shape == cu_seqlens_k.shape
        num_queries, num_keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        blind = num_queries > (num_keys if causal else num_keys * len(q))
        assert not blind.any(), "a query without a key has a log-sum-exp of +inf, which does not merge"
        swaps = max_q == 1 and q.shape[1] > k.shape[1] and not windowed
        if swaps:  # heads and queries change places, and then the bounds are not read
            assert len(q) == len(cu_seqlens_q) - 1
        return Ragged(cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal)

    def scoring(self, causal: bool, scale: float, left: int | None, right: int | None, softcap: float) -> Scoring:
        """A window counts the keys on either side of a query's own, -1 or None for all of them."""
        assert type(scale) is float and type(softcap) is float and softcap >= 0
        if left in (None, -1):
            assert right == left
            return Scoring(scale, softcap or None)
        assert type(left) is type(right) is int and left >= 0 and right == 0
        assert causal, "without causality the window would have another meaning than ours"
        return Scoring(scale, softcap or None, left + 1)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *ragged, scale: float, left=None, right=None, softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        self.num_forward += 1
        self.check_rows(q, k, v)
        scoring = self.scoring(ragged[-1], scale, left, right, softcap)
        self.seen.append(scoring)
        return EagerKernel().forward(q, k, v, self.ragged(q, k, v, *ragged, scoring.window is not None), scoring)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *ragged,
        scale: float, left=None, right=None, softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.num_backward += 1
        self.check_rows(dout, q, k, v, out)
        assert dout.shape == out.shape == q.shape
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        scoring = self.scoring(ragged[-1], scale, left, right, softcap)
        self.seen.append(scoring)
        bounds = self.ragged(q, k, v, *ragged, scoring.window is not None)
        return EagerKernel().backward(dout, q, k, v, out, lse, bounds, scoring)


def stand_in_for_aten(rules: FlashRules) -> SimpleNamespace:
    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        assert dropout_p == 0.0 and return_debug_mask is False
        assert seqused_k is alibi_slopes is block_table is num_splits is None
        ragged = cum_seq_q, cum_seq_k, max_q, max_k, is_causal
        window = {"left": window_size_left, "right": window_size_right}
        out, lse = rules.forward(query, key, value, *ragged, scale=scale, **window)
        rng_state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, lse, rng_state, unused, query.new_zeros(0)

    def _flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert rng_state.dtype == torch.uint64 and isinstance(unused, Tensor)
        ragged = cum_seq_q, cum_seq_k, max_q, max_k, is_causal
        window = {"left": window_size_left, "right": window_size_right}
        return rules.backward(grad_out, query, key, value, out, logsumexp, *ragged, scale=scale, **window)

    return SimpleNamespace(
        _flash_attention_forward=_flash_attention_forward, _flash_attention_backward=_flash_attention_backward
    )


def stand_in_for_flash_attn(rules: FlashRules) -> ModuleType:
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert alibi_slopes is block_table is leftpad_k is seqused_k is None
        assert return_softmax is zero_tensors is False
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
        modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
        out, lse = rules.forward(q, k, v, *ragged, scale=softmax_scale, **modifiers)
        return out, lse, None, torch.zeros(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert alibi_slopes is rng_state is None and zero_tensors is False
        assert deterministic is True, "atomics give other bits every time"
        assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
        rules.check_rows(dq, dk, dv)
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
        modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
        grads = rules.backward(dout, q, k, v, out, softmax_lse, *ragged, scale=softmax_scale, **modifiers)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)
        return torch.zeros(0)  # softmax_d

    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return interface


# `flash_attn_3::fwd` and `::bwd` as builds register them (hopper/flash_api.cpp in May 2025, and flash_api_stable.cpp).
FORWARD_3 = """
    fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new, Tensor(v_new!)? v_new, Tensor? q_v, Tensor(out!)? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left=-1, int window_size_right=-1,
    int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None,
    int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
BACKWARD_3 = """
    bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq, Tensor(dk!)? dk,
    Tensor(dv!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, float softmax_scale, bool is_causal, int window_size_left=-1,
    int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0)
    -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"""


def newer(schema: str) -> str:
    """Every argument after the tensors has a default by now."""
    arguments, arrow, results = schema.partition(" ->")
    arguments = re.sub(r"(\? \w+)(?=[,)])", r"\1=None", arguments)
    arguments = arguments.replace("float softmax_scale", "float? softmax_scale=None")
    return arguments.replace("bool is_causal,", "bool is_causal=False,") + arrow + results


class FlashAttn3:
    """Operators of flash-attn-3 that torch itself calls by their schema; `rules` are those of the running test."""

    def __init__(self, namespace: str, schemas: tuple[str, str]):
        self.rules = FlashRules(())
        self.library = torch.library.Library(namespace, "FRAGMENT")
        for schema, run in zip(schemas, (self.fwd, self.bwd), strict=True):
            self.library.define(" ".join(schema.split()))
            self.library.impl(run.__name__, run, "CPU")
        self.ops = getattr(torch.ops, namespace)

    def fwd(
        self, q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0,
        pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        unused = (
            k_new, v_new, q_v, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k,
            rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa,
        )  # fmt: skip
        assert all(x is None for x in unused) and attention_chunk == sm_margin == 0
        assert num_splits == 1, "0 is for a heuristic to choose"
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal
        modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
        out, lse = self.rules.forward(q, k, v, *ragged, scale=softmax_scale, **modifiers)
        return out, lse, q.new_zeros(0), q.new_zeros(0)

    def bwd(
        self, dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None,
        seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert seqused_q is seqused_k is None and sm_margin == 0
        assert deterministic is True, "atomics give other bits every time"
        assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
        self.rules.check_rows(dq, dk, dv)
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal
        modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
        grads = self.rules.backward(dout, q, k, v, out, softmax_lse, *ragged, scale=softmax_scale, **modifiers)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)
        return dq, dk, dv, *(q.new_zeros(0) for _ in range(5))


FLASH_ATTN_3 = {
    "flash_attn_3, older": FlashAttn3("flash_attn_3_older", (FORWARD_3, BACKWARD_3)),
    "flash_attn_3, newer": FlashAttn3("flash_attn_3_newer", (newer(FORWARD_3), newer(BACKWARD_3))),
}


@pytest.fixture
def rules() -> FlashRules:
    """Of the real kernels, but float64 is let in, to see the routing without rounding."""
    return FlashRules((*HALF, torch.float64))


@pytest.fixture(params=["torch", "flash_attn", *FLASH_ATTN_3])
def kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rules: FlashRules
) -> Iterator[VarlenKernel]:
    if request.param == "torch":
        monkeypatch.setattr(flash, "aten", stand_in_for_aten(rules))
        yield TorchCUDAKernel()
    elif request.param in FLASH_ATTN_3:
        stand_in = FLASH_ATTN_3[request.param]
        monkeypatch.setattr(stand_in, "rules", rules)
        for name in ("flash_attn_3", "flash_attn_3._C"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(torch.ops, "flash_attn_3", stand_in.ops)
        yield FlashAttn3Kernel()
    else:
        package, interface = ModuleType("flash_attn"), stand_in_for_flash_attn(rules)
        package.flash_attn_interface = interface
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
        yield FlashAttnKernel()


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_stand_in_has_the_signature_of_the_installed_torch(name: str) -> None:
    ours = inspect.signature(getattr(stand_in_for_aten(FlashRules(HALF)), name)).parameters.values()
    theirs = getattr(torch.ops.aten, name).default._schema.arguments
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in ours] == [(a.name, a.kwarg_only) for a in theirs]


def test_newer_operators_have_a_default_wherever_the_call_leaves_one_out() -> None:
    for name in ("fwd", "bwd"):
        older, later = (getattr(FLASH_ATTN_3[f"flash_attn_3, {age}"].ops, name).default for age in ("older", "newer"))
        names = [[argument.name for argument in op._schema.arguments] for op in (older, later)]
        assert names[0] == names[1]
        optional = [argument.name for argument in later._schema.arguments if argument.has_default_value()]
        assert optional == names[1][3 if name == "fwd" else 6 :]


@pytest.mark.parametrize("trie", TRIES)
@pytest.mark.parametrize("strategy", ["cascade", "path", "expand"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_float64(kernel: VarlenKernel, rules: FlashRules, trie: str, strategy: str, heads: tuple[int, int]) -> None:
    plan = plan_of(TRIES[trie], pad_to_multiple_of=4)
    layout = TreeLayout.from_plan(plan)
    tensors, scoring = inputs(plan, heads, 8, torch.float64), Scoring(0.4)
    truth = with_gradients(by_reference(layout, scoring), plan, *tensors)
    actual = with_gradients(on_cuda(strategy, layout, kernel, scoring), plan, *tensors)
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, actual, truth, strict=True)}
    assert max(errors.values()) <= 1e-12, errors
    num_calls = 1 + len(layout.levels) if strategy == "cascade" else 1
    assert (rules.num_forward, rules.num_backward) == (num_calls, num_calls)


MODIFIED = {
    "window of 1": ("path", Scoring(0.4, window=1)),
    "window of 3, path": ("path", Scoring(0.4, window=3)),
    "window of 3, expand": ("expand", Scoring(0.4, window=3)),
    "soft-cap, cascade": ("cascade", Scoring(0.4, softcap=0.7)),
    "soft-cap and window": ("path", Scoring(0.4, softcap=0.7, window=2)),
}


@pytest.mark.parametrize("trie", TRIES)
@pytest.mark.parametrize("name", MODIFIED)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_modifiers_reach_the_kernel(
    kernel: VarlenKernel, rules: FlashRules, trie: str, name: str, with_sinks: bool
) -> None:
    """Both directions receive the window and the soft-cap; sinks are merged outside."""
    strategy, scoring = MODIFIED[name]
    plan = plan_of(TRIES[trie], pad_to_multiple_of=4)
    layout, tensors = TreeLayout.from_plan(plan), inputs(plan, (4, 2), 8, torch.float64)
    if isinstance(kernel, TorchCUDAKernel) and scoring.softcap:  # tree_attention takes another kernel, or raises
        with pytest.raises(AssertionError, match="refuses a soft-cap on this kernel"):
            on_cuda(strategy, layout, kernel, scoring)(*tensors[:3])
        return
    results = []
    for attention_of in (by_reference, lambda *given: on_cuda(strategy, given[0], kernel, *given[1:])):
        sinks = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True) if with_sinks else None
        attention = attention_of(layout, scoring, sinks)
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = attention(*leaves)
        (out * tensors[3]).sum().backward()
        grads = [x.grad for x in (*leaves, *([sinks] if with_sinks else []))]
        results.append([out.detach()[: plan.num_unique_tokens], *grads])
    errors = [relative_error(x, y) for y, x in zip(*results, strict=True)]
    if scoring.window == 1:  # of a single key dq and dk are zero, but for the rounding of delta, unless sinks share
        errors = errors if with_sinks else [errors[0], errors[3], *(x.abs().max() for x in results[1][1:3])]
    assert max(errors) <= 1e-12, errors
    assert rules.seen == [scoring] * len(rules.seen) and len(rules.seen) >= 2


def test_torch_without_window_arguments_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.takes_window()
    arguments = [SimpleNamespace(name=name) for name in ("query", "scale")]
    old = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments)))
    monkeypatch.setattr(flash, "aten", SimpleNamespace(_flash_attention_forward=old, _flash_attention_backward=old))
    assert not flash.takes_window()


@pytest.mark.parametrize("strategy", ["cascade", "path", "expand"])
@pytest.mark.parametrize("dtype", HALF)
def test_16_bit(kernel: VarlenKernel, rules: FlashRules, strategy: str, dtype: torch.dtype) -> None:
    rules.dtypes = HALF
    sequences = [[token for token in sequence for _ in range(8)] for sequence in TRIES["nested"]]
    plan = plan_of(sequences, min_shared_tokens=2, pad_to_multiple_of=16)
    layout = TreeLayout.from_plan(plan)
    tensors, scale = inputs(plan, (4, 2), 16, dtype), 0.25
    wide = [x.double() for x in tensors]
    truth = with_gradients(by_reference(layout, Scoring(scale)), plan, *wide)
    out, _, *grads = flash_attention_by_the_book(*tensors, tree_mask(layout.row_subtree_ends), scale)
    actual = with_gradients(on_cuda(strategy, layout, kernel, Scoring(scale)), plan, *tensors)
    assert_within_reference_error(actual, [out[: plan.num_unique_tokens], *grads], truth, names=NAMES)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize("strategy", ["cascade", "path", "expand"])
def test_strided_last_axis(kernel: VarlenKernel, strategy: str, which: str) -> None:
    """Every tensor that the kernel sees, gradients that it fills included, must be contiguous in its last axis."""
    plan = plan_of(TRIES["nested"])
    layout = TreeLayout.from_plan(plan)
    tensors = inputs(plan, (4, 2), 8, torch.float64)
    attention = on_cuda(strategy, layout, kernel, Scoring(0.4))
    expected = with_gradients(attention, plan, *tensors)
    strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in tensors]
    names = ("q", "k", "v", "dout")
    views = [y if which in (name, "all") else x for name, x, y in zip(names, tensors, strided, strict=True)]
    actual = with_gradients(attention, plan, *views)
    assert max(relative_error(x, y) for x, y in zip(actual, expected, strict=True)) <= 1e-12


def test_gradient_of_a_sum(kernel: VarlenKernel) -> None:
    plan = plan_of(TRIES["nested"])
    layout = TreeLayout.from_plan(plan)
    *tensors, dout = inputs(plan, (4, 2), 8, torch.float64)
    attention = on_cuda("cascade", layout, kernel, Scoring(0.4))
    ones = torch.ones_like(dout)
    expanded = with_gradients(attention, plan, *tensors, ones[0, 0, 0].expand_as(dout))
    assert all(
        torch.equal(x, y) for x, y in zip(expanded, with_gradients(attention, plan, *tensors, ones), strict=True)
    )


def test_entries_without_queries(kernel: VarlenKernel) -> None:
    """Their keys get a gradient of zero. No layout makes one, but the kernels take them."""
    queries, keys = torch.tensor([0, 0, 2, 2, 5]), torch.tensor([0, 3, 5, 5, 9])
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4, 8), (9, 2, 8), (9, 2, 8), (5, 4, 8)]
    q, k, v, dout = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    ragged, scoring = Ragged(queries.int(), keys.int(), 3, 4, True), Scoring(0.4)
    out, lse = kernel.forward(q, k, v, ragged, scoring)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, ragged, scoring)
    for rows, seen in ((slice(0, 2), slice(3, 5)), (slice(2, 5), slice(5, 9))):
        mask = torch.ones(rows.stop - rows.start, seen.stop - seen.start, dtype=torch.bool)
        mask = mask.tril(mask.shape[1] - mask.shape[0])
        truth = flash_attention_by_the_book(q[rows], k[seen], v[seen], dout[rows], mask, 0.4)
        actual = out[rows], lse[:, rows], dq[rows], dk[seen], dv[seen]
        assert max(relative_error(x, y) for x, y in zip(actual, truth, strict=True)) <= 1e-12
    assert not dk[:3].any() and not dv[:3].any()


@pytest.mark.parametrize("trie", TRIES)
@pytest.mark.parametrize("padding", [None, 4])
def test_no_entry_of_ours_is_empty(trie: str, padding: int | None) -> None:
    """Empty entries have been trouble in kernels of every version, and a query without a key has no log-sum-exp."""
    layout = TreeLayout.from_plan(plan_of(TRIES[trie], pad_to_multiple_of=padding))
    calls = [piece.ragged for piece in layout.packed_pieces()] + [layout.paths, layout.sequences]
    for ragged in calls:
        num_queries, num_keys = ragged.cu_seqlens_q.diff(), ragged.cu_seqlens_k.diff()
        assert (num_queries > 0).all() and (num_keys > 0).all()
        assert not ragged.causal or (num_keys >= num_queries).all()


class TestWhatFlashAttention3Lacks:
    CUDA = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))

    def test_nothing(self) -> None:
        assert flash_3_missing(self.CUDA) is None

    def test_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert "the package flash-attn-3 is not installed" in flash_3_missing(self.CUDA)

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
    def test_a_hopper(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        expected = f"needs a Hopper GPU (compute capability 9.x), this one has {capability[0]}.{capability[1]}"
        assert flash_3_missing(self.CUDA) == expected

    def test_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert "torch sees no CUDA device" in flash_3_missing(self.CUDA)


def test_rules_are_enforced(kernel: VarlenKernel, rules: FlashRules) -> None:
    """The stand-ins refuse what the real kernels refuse or misread."""
    q, k, v, dout = inputs(plan_of([[1, 2, 3, 4]]), (2, 2), 8, torch.float64)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    good = Ragged(cu_seqlens, cu_seqlens, 4, 4, True)
    out, lse = kernel.forward(q, k, v, good, Scoring(1.0))
    for bad in (
        Ragged(cu_seqlens.long(), cu_seqlens, 4, 4, True),
        Ragged(cu_seqlens, cu_seqlens + 1, 4, 4, True),
        Ragged(cu_seqlens, cu_seqlens, 3, 4, True),
        Ragged(torch.tensor([0, 0, 4], dtype=torch.int32), torch.tensor([0, 4, 4], dtype=torch.int32), 4, 4, False),
    ):
        with pytest.raises(AssertionError):
            kernel.forward(q, k, v, bad, Scoring(1.0))
        with pytest.raises(AssertionError):
            kernel.backward(dout, q, k, v, out, lse, bad, Scoring(1.0))
    with pytest.raises(AssertionError, match="head_size 7"):
        kernel.forward(q[..., :7], k[..., :7], v[..., :7], good, Scoring(1.0))
    rules.dtypes = HALF
    with pytest.raises(AssertionError, match=r"got torch\.float64"):
        kernel.forward(q, k, v, good, Scoring(1.0))
