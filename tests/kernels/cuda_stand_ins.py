"""Stand-ins on a CPU for the CUDA kernels of attention: flash-attention in four packages, torch's others, cuDNN's.

Each is an operator that takes the arguments of the real function by its signature, checks what the real one checks
before it starts (or takes for granted, and reads wrong memory), and computes eagerly. Those of torch are registered
for CPU tensors, so every call is checked against the schema of the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixtrain.kernels.cpu_loops import EagerKernel
from radixtrain.kernels.varlen_args import Ragged, Scoring

HALF = (torch.bfloat16, torch.float16)
aten = torch.ops.aten
# `_flash_attn_varlen_forward` and `_backward` of `flash_attn.flash_attn_interface`; the second fills dq, dk and dv.
FORWARD_2 = """
    fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k,
    float dropout_p, float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1,
    float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None,
    Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"""
BACKWARD_2 = """
    bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!) dq, Tensor(dk!) dk,
    Tensor(dv!) dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float dropout_p,
    float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes,
    bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> ()"""
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
# `_flash_attn_fwd` and `_bwd` of `flash_attn.cute.interface`, 4.0.0b36: of the arguments those for us, by name only.
FORWARD_4 = """
    fwd(Tensor q, Tensor k, Tensor v, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None,
    int? max_seqlen_k=None, float? softmax_scale=None, bool causal=False, float? softcap=None,
    int? window_size_left=None, int? window_size_right=None, int num_splits=1, bool return_lse=False)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""
BACKWARD_4 = """
    bwd(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor lse, *, float? softmax_scale=None,
    bool causal=False, float softcap=0.0, int? window_size_left=None, int? window_size_right=None,
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,
    bool deterministic=False) -> (Tensor, Tensor, Tensor)"""


class Names(NamedTuple):
    """What a varlen flash kernel calls its arguments. What has no name here must be off.

    tensors: q, k, v; or dout, q, k, v, out and the log-sum-exp. bounds: of `Ragged`. options: of `Flash.forward`, by
    our names. must: further arguments and their values. unread: others, which are of this dtype.
    """

    tensors: tuple[str, ...]
    bounds: tuple[str, ...]
    options: dict[str, str]
    must: dict[str, Any]
    unread: dict[str, torch.dtype]


def packaged(*tensors: str, causal: str = "causal", **must: Any) -> Names:
    bounds = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", causal
    return Names(tensors, bounds, {**OPTIONS, "scale": "softmax_scale", "softcap": "softcap"}, must, {})


OPTIONS = {"scale": "scale", "left": "window_size_left", "right": "window_size_right"}
BOUNDS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal")
EFFICIENT_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "custom_mask_type")
QKV, OF_TORCH, BACKWARD = ("q", "k", "v"), ("query", "key", "value"), ("dout", "q", "k", "v", "out", "softmax_lse")
# By namespace: forward and backward. Splits of the keys: 0 is for a heuristic to choose. Without a fixed order, atomics
# give other bits every time.
PACKAGED = {
    "flash_attn_2_stand_in": ((FORWARD_2, packaged(*QKV)), (BACKWARD_2, packaged(*BACKWARD, deterministic=True))),
    "flash_attn_3_stand_in": (
        (FORWARD_3, packaged(*QKV, causal="is_causal", num_splits=1)),
        (BACKWARD_3, packaged(*BACKWARD, causal="is_causal", deterministic=True)),
    ),
    "flash_attn_4_stand_in": (
        (FORWARD_4, packaged(*QKV, num_splits=1, return_lse=True)),
        (BACKWARD_4, packaged(*BACKWARD[:-1], "lse", deterministic=True)),
    ),
}
INSIDE_TORCH = {
    aten._flash_attention_forward: Names(OF_TORCH, BOUNDS, OPTIONS, {}, {}),
    aten._flash_attention_backward: Names(
        ("grad_out", *OF_TORCH, "out", "logsumexp"),
        BOUNDS,
        OPTIONS,
        {},
        dict.fromkeys(("rng_state", "unused"), torch.uint64),
    ),
}


def register(library: torch.library.Library, operator: Any, run: Callable[..., Any]) -> None:
    """For CPU tensors, `run` receives all arguments of the operator by name, the defaults too.

    What it returns is filled up with tensors that nobody reads, or left out if the operator returns nothing.
    """
    schema = operator.default._schema
    names = [argument.name for argument in schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {argument.name: argument.default_value for argument in schema.arguments}
        found = run({**given, **dict(zip(names, args, strict=False)), **kwargs})
        rest = [torch.zeros(0) for _ in schema.returns[len(found) :]]
        return (*found, *rest) if schema.returns else None

    library.impl(schema.name.split("::")[1], call, "CPU")


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
        torchs = torch.library.Library("aten", "IMPL")
        for operator, names in INSIDE_TORCH.items():
            register(torchs, operator, partial(self._varlen, names))
        register(torchs, aten._efficient_attention_forward, self._efficient_forward)
        register(torchs, aten._efficient_attention_backward, self._efficient_backward)
        register(torchs, aten._scaled_dot_product_cudnn_attention, self._dense_forward)
        register(torchs, aten._scaled_dot_product_cudnn_attention_backward, self._dense_backward)
        self.libraries = [torchs]  # unregistered with this object
        for namespace, directions in PACKAGED.items():
            self.libraries.append(library := torch.library.Library(namespace, "FRAGMENT"))
            for name, (schema, names) in zip(("fwd", "bwd"), directions, strict=True):
                library.define(" ".join(schema.split()))
                register(library, getattr(getattr(torch.ops, namespace), name), partial(self._varlen, names))

    def packages(self) -> dict[str, Any]:
        """For `sys.modules`. The functions of version 3 are operators of torch."""
        two, four = torch.ops.flash_attn_2_stand_in, torch.ops.flash_attn_4_stand_in
        return {
            **{name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn_3", "flash_attn_3._C")},
            "flash_attn.flash_attn_interface": SimpleNamespace(
                _flash_attn_varlen_forward=two.fwd, _flash_attn_varlen_backward=two.bwd
            ),
            "flash_attn.cute.interface": SimpleNamespace(_flash_attn_fwd=four.fwd, _flash_attn_bwd=four.bwd),
        }

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

    def _call(
        self, tensors: tuple[Tensor, ...], bounds: tuple[Any, ...], scale: float, left=None, right=None, softcap=0.0
    ) -> tuple[Ragged, Scoring]:
        """tensors: q, k, v."""
        ragged = Ragged(*bounds)
        scoring = self._scoring(ragged.causal, scale, left, right, softcap)
        self._ragged(*tensors, ragged, scoring.window is not None)
        return ragged, scoring

    def forward(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """given: q, k, v and the bounds. options: of the scoring."""
        self.num_forward += 1
        tensors, bounds = given[:3], given[3:]
        assert tensors[0].ndim == 3
        check_rows(self.dtypes, *tensors)
        return EagerKernel().forward(*tensors, *self._call(tensors, bounds, **options))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *bounds: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.num_backward += 1
        check_rows(self.dtypes, dout, q, k, v, out)
        assert dout.shape == out.shape == q.shape
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        return EagerKernel().backward(dout, q, k, v, out, lse, *self._call((q, k, v), bounds, **options))

    def _varlen(self, names: Names, given: dict[str, Any]) -> list[Tensor]:
        """In one direction. Some packages write into gradients that the caller made."""
        known = *names.tensors, *names.bounds, *names.options.values(), *names.must, *names.unread
        assert_only(given, *known, "dq", "dk", "dv")
        assert {name: given[name] for name in names.must} == names.must
        assert {name: given[name].dtype for name in names.unread} == names.unread
        tensors, bounds = ([given[name] for name in some] for some in (names.tensors, names.bounds))
        options = {ours: given[theirs] for ours, theirs in names.options.items()}
        results = [*(self.forward if len(tensors) == 3 else self.backward)(*tensors, *bounds, **options)]
        if "dq" not in given:
            return results
        gradients = [given[name] for name in ("dq", "dk", "dv")]
        assert [x.shape for x in gradients] == [x.shape for x in tensors[1:4]]
        check_rows(self.dtypes, *gradients)
        return [gradient.copy_(value) for gradient, value in zip(gradients, results, strict=True)]

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

    def _efficient_backward(self, given: dict[str, Any]) -> list[Tensor]:
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
        return grads

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
