"""Stand-ins on a CPU for the CUDA kernels of attention: flash-attention in four packages, torch's others, cuDNN's.

Each takes the arguments of the real function by its signature, checks what the real one checks before it starts (or
takes for granted, and reads wrong memory), and computes eagerly. Operators are registered with torch for CPU tensors,
so every call is checked against the schema of the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.cpu_loops import EagerKernel
from radixtrain.kernels.varlen_args import Ragged, Scoring

HALF = (torch.bfloat16, torch.float16)
# `flash_attn_3::fwd` and `::bwd` as older builds register them (hopper/flash_api.cpp in May 2025): every argument after
# the tensors must be given. Newer ones have the same names and more defaults.
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
# Names of arguments: of torch's operators, and of version 3. Options by our names.
BOUNDS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal")
OPTIONS = {"scale": "scale", "left": "window_size_left", "right": "window_size_right"}
BOUNDS_3 = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "is_causal")
OPTIONS_3 = {**OPTIONS, "scale": "softmax_scale", "softcap": "softcap"}
EFFICIENT_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "custom_mask_type")


def register(library: torch.library.Library, operator: Any, run: Callable[..., Any]) -> None:
    """For CPU tensors, `run` receives all arguments of the operator by name, the defaults too."""
    arguments = operator.default._schema.arguments
    names = [argument.name for argument in arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {argument.name: argument.default_value for argument in arguments}
        return run({**given, **dict(zip(names, args, strict=False)), **kwargs})

    library.impl(operator.default._schema.name.split("::")[1], call, "CPU")


def assert_only(given: dict[str, Any], *names: str) -> None:
    """Every argument that has no name here is off."""
    others = {name: value for name, value in given.items() if name not in names}
    assert all(value is None or value is False or value == 0 for value in others.values()), others


def check_rows(dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype == tensors[0].dtype and x.dtype in dtypes, f"got {x.dtype}"
        assert x.stride(-1) == 1, "the last axis has gaps"
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, f"head_dim {x.shape[-1]}"
        assert not any(step % 8 for step in (x.storage_offset(), *strides(x)[:-1])), "not at multiples of 16 bytes"


def strides(x: Tensor) -> tuple[int, ...]:
    """Those that are used: an axis of length 1 may have any."""
    return tuple(step if length > 1 else 0 for step, length in zip(x.stride(), x.shape, strict=True))


def check_16_bytes(dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> None:
    """What torch's memory-efficient kernel takes: (1, rows, heads, head dim), loaded 16 bytes at a time."""
    for x in tensors:
        assert x.dtype == tensors[0].dtype and x.dtype in dtypes, f"got {x.dtype}"
        assert x.ndim == 4 and len(x) == 1 and x.stride(-1) == 1 and x.shape[2:] == tensors[0].shape[2:]
        steps = (x.storage_offset(), x.shape[-1], *strides(x)[:-1])
        assert not any(step * x.element_size() % 16 for step in steps), "not at multiples of 16 bytes"


def check_dense(dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> None:
    """What cuDNN's dense kernel takes: (E, heads, rows, head dim). A plan does not know the layout of out and dout."""
    for x in tensors:
        assert x.ndim == 4 and x.transpose(1, 2).is_contiguous()
        check_rows(dtypes, x[0])


def ceil_32(length: int) -> int:
    return -(-length // 32) * 32


class Flash:
    """What a varlen flash kernel demands (`mha_varlen_fwd` and `_bwd` in flash_api.cpp; all versions alike)."""

    def __init__(self) -> None:
        self.reset()
        aten, own = torch.library.Library("aten", "IMPL"), torch.library.Library("flash_attn_3_stand_in", "FRAGMENT")
        for schema in (FORWARD_3, BACKWARD_3):
            own.define(" ".join(schema.split()))
        self.ops_3 = torch.ops.flash_attn_3_stand_in
        register(aten, torch.ops.aten._flash_attention_forward, self._torch_forward)
        register(aten, torch.ops.aten._flash_attention_backward, self._torch_backward)
        register(aten, torch.ops.aten._efficient_attention_forward, self._efficient_forward)
        register(aten, torch.ops.aten._efficient_attention_backward, self._efficient_backward)
        register(aten, torch.ops.aten._scaled_dot_product_cudnn_attention, self._dense_forward)
        register(aten, torch.ops.aten._scaled_dot_product_cudnn_attention_backward, self._dense_backward)
        register(own, self.ops_3.fwd, self._forward_3)
        register(own, self.ops_3.bwd, self._backward_3)
        self.libraries = [aten, own]  # unregistered with this object

    def reset(self) -> None:
        """Float64 is let in, to see the routing without rounding."""
        self.dtypes: tuple[torch.dtype, ...] = (*HALF, torch.float64)
        self.wide_dtypes: tuple[torch.dtype, ...] = (*self.dtypes, torch.float32)
        self.num_forward = self.num_backward = 0
        self.seen: list[Scoring] = []
        self.dense: list[tuple[int, int, int]] = []  # entries, queries and keys of each

    def _ragged(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, windowed: bool) -> None:
        assert k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
        assert type(ragged.causal) is bool
        for rows, bounds, longest in (
            (q, ragged.cu_seqlens_q, ragged.max_seqlen_q),
            (k, ragged.cu_seqlens_k, ragged.max_seqlen_k),
        ):
            assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.ndim == 1
            assert bounds[0] == 0 and bounds[-1] == len(rows) and bounds.diff().min() >= 0
            assert type(longest) is int and longest == bounds.diff().max()
        assert ragged.cu_seqlens_q.shape == ragged.cu_seqlens_k.shape
        num_queries, num_keys = ragged.cu_seqlens_q.diff(), ragged.cu_seqlens_k.diff()
        blind = num_queries > (num_keys if ragged.causal else num_keys * len(q))
        assert not blind.any(), "a query without a key has a log-sum-exp of +inf, which does not merge"
        if ragged.max_seqlen_q == 1 and q.shape[1] > k.shape[1] and not windowed:
            assert len(q) == len(num_queries), "heads and queries change places, and then the bounds are not read"

    def _scoring(self, causal: bool, scale: float, left: int | None, right: int | None, softcap: float) -> Scoring:
        """A window counts the keys on either side of a query's own, -1 or None for all of them."""
        assert type(scale) is float and type(softcap) is float and softcap >= 0
        window = None if left in (None, -1) else left + 1
        assert right == (left if window is None else 0)
        assert causal or window is None, "without causality the window would have another meaning than ours"
        self.seen.append(Scoring(scale, softcap or None, window))
        return self.seen[-1]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *bounds: Any, scale: float, left=None, right=None, softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        self.num_forward += 1
        assert q.ndim == 3
        check_rows(self.dtypes, q, k, v)
        ragged = Ragged(*bounds)
        scoring = self._scoring(ragged.causal, scale, left, right, softcap)
        self._ragged(q, k, v, ragged, scoring.window is not None)
        return EagerKernel().forward(q, k, v, ragged, scoring)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *bounds: Any,
        scale: float, left=None, right=None, softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.num_backward += 1
        check_rows(self.dtypes, dout, q, k, v, out)
        assert dout.shape == out.shape == q.shape
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        ragged = Ragged(*bounds)
        scoring = self._scoring(ragged.causal, scale, left, right, softcap)
        self._ragged(q, k, v, ragged, scoring.window is not None)
        return EagerKernel().backward(dout, q, k, v, out, lse, ragged, scoring)

    def _fill(self, gradients: list[Tensor], tensors: list[Tensor], deterministic: bool, *given: Any, **options: Any):
        """The packages write into gradients that the caller made."""
        assert deterministic is True, "atomics give other bits every time"
        assert [x.shape for x in gradients] == [x.shape for x in tensors[1:4]]
        check_rows(self.dtypes, *gradients)
        for gradient, value in zip(gradients, self.backward(*tensors, *given, **options), strict=True):
            gradient.copy_(value)

    def _torch_forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        names = ("query", "key", "value", *BOUNDS)
        assert_only(given, *names, *OPTIONS.values())
        options = {name: given[theirs] for name, theirs in OPTIONS.items()}
        out, lse = self.forward(*(given[name] for name in names), **options)
        unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, lse, *unused, out.new_zeros(0)

    def _torch_backward(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", *BOUNDS)
        assert_only(given, *names, *OPTIONS.values(), "rng_state", "unused")
        assert given["rng_state"].dtype == torch.uint64 and isinstance(given["unused"], Tensor)
        options = {name: given[theirs] for name, theirs in OPTIONS.items()}
        return self.backward(*(given[name] for name in names), **options)

    def _efficient_call(self, given: dict[str, Any], q: Tensor, k: Tensor) -> tuple[Ragged, Scoring]:
        """Some entries of the rows, in order. Mask type 2 is bottom-right causal."""
        assert given["dropout_p"] == 0.0 and given["custom_mask_type"] in (0, 2)
        window = given["window_size"]
        left, right = (None, None) if window is None else (window - 1, 0)
        *bounds, mask = (given[name] for name in EFFICIENT_BOUNDS)
        for starts, rows, longest in zip(bounds[:2], (q, k), bounds[2:], strict=True):
            assert starts.dtype == torch.int32 and starts.is_contiguous() and starts.ndim == 1
            assert type(longest) is int and starts.diff().max() <= longest <= rows.shape[1] and longest > 0
        blind = bounds[0].diff() > (bounds[1].diff() if mask else bounds[1].diff() * q.shape[1])
        assert len(bounds[0]) == len(bounds[1]) and not blind.any(), "out of a query without a key is not written"
        return Ragged(*bounds, causal=mask == 2), self._scoring(mask == 2, given["scale"], left, right, 0.0)

    def _efficient_forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        self.num_forward += 1
        tensors = [given[name] for name in ("query", "key", "value")]
        names = "query", "key", "value", *EFFICIENT_BOUNDS, "compute_log_sumexp", "scale", "window_size"
        assert_only(given, *names)
        check_16_bytes(self.wide_dtypes, *tensors)
        ragged, scoring = self._efficient_call(given, *tensors[:2])
        starts = ragged.cu_seqlens_q.tolist()
        assert given["compute_log_sumexp"] is True and (starts[0], starts[-1]) == (0, tensors[0].shape[1])
        out, lse = EagerKernel().forward(*(x[0] for x in tensors), ragged, scoring)
        padded = lse.new_full((len(starts) - 1, len(lse), ceil_32(ragged.max_seqlen_q)), float("nan"))
        for entry, (start, end) in enumerate(pairwise(starts)):
            padded[entry, :, : ceil_32(end - start)] = float("inf")
            padded[entry, :, : end - start] = lse[:, start:end]
        unused = torch.zeros((), dtype=torch.int64)
        return out[None], padded, unused, unused, ragged.max_seqlen_q, ragged.max_seqlen_k

    def _efficient_backward(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """Rows outside the given entries are not written."""
        self.num_backward += 1
        names = "grad_out_", "query", "key", "value", "out"
        unread = "logsumexp", "scale", "window_size", "philox_seed", "philox_offset"
        assert_only(given, *names, *EFFICIENT_BOUNDS, *unread)
        dout, q, k, v, out = tensors = [given[name] for name in names]
        check_16_bytes(self.wide_dtypes, *tensors)
        assert out.is_contiguous() and dout.shape == out.shape == q.shape and k.shape == v.shape
        ragged, scoring = self._efficient_call(given, q, k)
        is_even = torch.equal(ragged.cu_seqlens_q, ragged.cu_seqlens_k)
        assert scoring.window is None or is_even, "its window counts from the top left (torch 2.11 on an H100)"
        starts, padded = ragged.cu_seqlens_q.tolist(), given["logsumexp"]
        assert padded.shape == (len(starts) - 1, q.shape[2], ceil_32(ragged.max_seqlen_q))
        assert padded.dtype == torch.promote_types(q.dtype, torch.float32)
        lse = padded.new_zeros(q.shape[2], q.shape[1])
        for entry, (start, end) in enumerate(pairwise(starts)):
            assert (padded[entry, :, end - start : ceil_32(end - start)] == float("inf")).all()
            lse[:, start:end] = padded[entry, :, : end - start]
        of_q, of_k = ragged.cu_seqlens_q, ragged.cu_seqlens_k
        queries, keys = (slice(int(bounds[0]), int(bounds[-1])) for bounds in (of_q, of_k))
        inside = [x[0, keys if x is k or x is v else queries] for x in tensors]
        longest = int(of_q.diff().max()), int(of_k.diff().max())
        entries = Ragged(of_q - of_q[0], of_k - of_k[0], *longest, ragged.causal)
        shares = EagerKernel().backward(*inside, lse[:, queries], entries, scoring)
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        for grad, rows, share in zip(grads, (queries, keys, keys), shares, strict=True):
            grad[0, rows] = share
        return *grads, dout.new_zeros(0)

    def _dense_call(self, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Ragged, Scoring]:
        number, num_queries, num_keys, causal = len(q), q.shape[2], k.shape[2], given["is_causal"]
        assert k.shape == v.shape and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0 and number == len(k)
        assert num_keys > 1 and (num_queries == num_keys or not causal), "causal from the top left; no single key"
        self.dense.append((number, num_queries, num_keys))
        bounds = (n * torch.arange(number + 1, dtype=torch.int32) for n in (num_queries, num_keys))
        return Ragged(*bounds, num_queries, num_keys, causal), self._scoring(causal, given["scale"], None, None, 0.0)

    def _dense_forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        self.num_forward += 1
        names = "query", "key", "value"
        assert_only(given, *names, "compute_log_sumexp", "is_causal", "scale")
        assert given["compute_log_sumexp"] is True
        tensors = [given[name] for name in names]
        check_dense(self.dtypes, *tensors)
        ragged, scoring = self._dense_call(given, *tensors)
        out, lse = EagerKernel().forward(*(x.transpose(1, 2).flatten(0, 1) for x in tensors), ragged, scoring)
        lse = lse.unflatten(1, (len(tensors[0]), -1)).transpose(0, 1)
        unused = torch.zeros((), dtype=torch.int64)
        rest = None, None, ragged.max_seqlen_q, ragged.max_seqlen_k, unused, unused, None
        return out.unflatten(0, (len(lse), -1)).transpose(1, 2), lse.contiguous()[..., None], *rest

    def _dense_backward(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        self.num_backward += 1
        names, unread = ("grad_out", "query", "key", "value", "out"), ("philox_seed", "philox_offset")
        assert_only(given, *names, "logsumexp", "max_q", "max_k", "is_causal", "scale", *unread)
        dout, q, k, v, out = tensors = [given[name] for name in names]
        check_dense(self.dtypes, *tensors)
        ragged, scoring = self._dense_call(given, q, k, v)
        assert dout.shape == out.shape == q.shape and (given["max_q"], given["max_k"]) == (q.shape[2], k.shape[2])
        lse = given["logsumexp"]
        assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in tensors)
        grads = EagerKernel().backward(*rows, lse[..., 0].transpose(0, 1).flatten(1), ragged, scoring)
        return tuple(x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in grads)

    def _forward_3(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        names = ("q", "k", "v", *BOUNDS_3)
        assert_only(given, *names, *OPTIONS_3.values(), "num_splits")
        assert given["num_splits"] == 1, "0 is for a heuristic to choose"
        options = {name: given[theirs] for name, theirs in OPTIONS_3.items()}
        out, lse = self.forward(*(given[name] for name in names), **options)
        return out, lse, out.new_zeros(0), out.new_zeros(0)

    def _backward_3(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        tensors, gradients = ("dout", "q", "k", "v", "out", "softmax_lse"), ("dq", "dk", "dv")
        assert_only(given, *tensors, *gradients, *BOUNDS_3, *OPTIONS_3.values(), "deterministic")
        options = {name: given[theirs] for name, theirs in OPTIONS_3.items()}
        results, bounds = [given[name] for name in gradients], [given[name] for name in BOUNDS_3]
        self._fill(results, [given[name] for name in tensors], given["deterministic"], *bounds, **options)
        return *results, *(results[0].new_zeros(0) for _ in range(5))

    def package_2(self) -> ModuleType:
        """`flash_attn.flash_attn_interface`."""

        def _flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
        ):  # fmt: skip
            assert dropout_p == 0.0 and return_softmax is zero_tensors is False
            assert alibi_slopes is block_table is leftpad_k is seqused_k is None
            bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
            modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
            out, lse = self.forward(q, k, v, *bounds, scale=softmax_scale, **modifiers)
            return out, lse, None, torch.zeros(2, dtype=torch.int64)

        def _flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state=None, zero_tensors=False,
        ):  # fmt: skip
            assert dropout_p == 0.0 and alibi_slopes is rng_state is None and zero_tensors is False
            bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
            modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
            tensors = [dout, q, k, v, out, softmax_lse]
            self._fill([dq, dk, dv], tensors, deterministic, *bounds, scale=softmax_scale, **modifiers)
            return torch.zeros(0)  # softmax_d

        interface = ModuleType("flash_attn.flash_attn_interface")
        interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
        interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
        return interface

    def package_4(self) -> ModuleType:
        """`flash_attn.cute.interface` of 4.0.0b36: of its arguments those that are for us, by name only."""

        def _flash_attn_fwd(
            q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
            causal=False, softcap=None, window_size_left=None, window_size_right=None, num_splits=1, return_lse=False,
        ):  # fmt: skip
            assert return_lse is True and num_splits == 1, "0 is for a heuristic to choose"
            bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
            modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
            return *self.forward(q, k, v, *bounds, scale=softmax_scale, **modifiers), None, None, None

        def _flash_attn_bwd(
            q, k, v, out, dout, lse, *, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
            window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
            deterministic=False,
        ):  # fmt: skip
            assert deterministic is True, "atomics give other bits every time"
            bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
            modifiers = {"left": window_size_left, "right": window_size_right, "softcap": softcap}
            return self.backward(dout, q, k, v, out, lse, *bounds, scale=softmax_scale, **modifiers)

        interface = ModuleType("flash_attn.cute.interface")
        interface._flash_attn_fwd = _flash_attn_fwd
        interface._flash_attn_bwd = _flash_attn_bwd
        return interface
