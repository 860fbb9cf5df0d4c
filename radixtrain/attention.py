"""Tree attention, the only way to the kernels: validate, choose, dispatch. A request that cannot be met raises.

| strategy    | queries       | keys and values          | calls                      | a window that binds |
|-------------|---------------|--------------------------|----------------------------|---------------------|
| `reference` | U             | U, explicit mask         | eager; the specification   | yes                 |
| `expand`    | scatter to T  | T                        | one varlen call            | yes                 |
| `path`      | U             | root paths, gathered     | one varlen call            | yes                 |
| `cascade`   | U, no copies  | U, no copies             | few (`tree/chains.py`)     | no                  |
| `tree`      | U, no copies  | U, no copies             | one, with a block mask     | yes                 |

Sinks go with every strategy and kernel, a soft-cap with every strategy but `tree` and the kernels that compute it
(`kernels/varlen.py`). A window binds if it is shorter than the longest sequence; any other hides nothing.

`tree` is torch's FlexAttention (`kernels/tree_flex.py`), on CUDA only. `auto` never chooses it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from radixtrain.errors import UserError
from radixtrain.kernels.functions import wide
from radixtrain.kernels.merge_attention import (
    Piece,
    Route,
    merged_pieces,
    route_backward,
    route_forward,
    routed_attention,
)
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.stored import Shared, attention_to_own
from radixtrain.kernels.tree_flex import flex_refusal, flex_tree_attention, tree_block_mask
from radixtrain.kernels.varlen import KERNELS, KernelCall, varlen_kernel, varlen_refusal
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel, added_to_scores
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

EVERYWHERE = ("cascade", "path", "expand", "reference")  # in any floating dtype, on any device
STRATEGIES = (*EVERYWHERE, "tree")
WITH_BLOCKS = ("cascade", "path", "reference")  # in which blocks of rows attend in both directions
# Forward and backward of 40,320 tokens on an H100, head dim 128: version 3 in 74.3 ms, 4 in 74.1, 2 in 142.3
# (ecmwf/anemoi-core#959). Version 3 before 4: it is there at once, 4 compiles in the first step.
PREFERRED_ON_CUDA = ("flash_attn_3", "flash_attn_4", "flash_attn", "torch", "efficient", "eager")
# Under `auto` sequences of one length that share nothing are a batch for torch's own attention, with these kernels too:
# 8 padded rows took 0.373 s with it, packed ones 0.377 s with version 4 (recipes/benchmarks/2026-11-27-h200-3f31f96-
# second.md). A kernel that is named computes every batch.
AS_FAST_AS_TORCH = ("torch", "flash_attn_3", "flash_attn_4")
FORM = attrgetter("shape", "dtype", "device")
logger = logging.getLogger(__name__)


class AttentionChoice(NamedTuple):
    """What runs, and why: `str()` is the line for the log. is_slow: a loop on CUDA, for want of a kernel."""

    strategy: str
    kernel: str
    reason: str
    is_slow: bool = False

    def __str__(self) -> str:
        return f"attention={self.strategy}, kernel={self.kernel} ({self.reason})"


_LOGGED: set[tuple[str, str]] = set()  # strategy and kernel
_EAGER_ON_CUDA = "; eager is a loop of matrix products that writes every score to memory, no fused kernel: it is slow"


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: PrefixPlan | TreeLayout,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    both_ways: bool = False,
) -> Tensor:
    """Compute attention on unique tokens: every query sees the keys of its own root path, itself included.

    query: (U, N, H), float64, float32, bfloat16 or float16.
    key, value: (U, K, H), same dtype and device; N is a multiple of K (grouped-query attention).
    plan: the prefix plan of these U rows. A `TreeLayout` on the device of the tensors saves the copy.
    attention: `cascade` computes shared and own keys by separate calls without copies and merges them; `path` gathers
        the root path of every row; `expand` computes all T tokens; `tree` is FlexAttention, on CUDA; `reference` is
        eager, with an explicit mask. `auto` is `cascade`, or `path` if a window binds.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3`, `flash_attn_4`, `cudnn`, `efficient` or `eager`. `reference`
        does not read it; `tree` has its own kernel and takes only `auto`.
    scale: factor on the scores; default `H ** -0.5`.
    softcap: None, or c: scaled scores s become `c * tanh(s / c)`.
    window: None, or w: a query sees the last w tokens of its path, itself included, counted in tokens.
    sinks: None, or (N,), floating point. A logit for every query of a head that has no value.
    both_ways: rows of `blocks` of the layout see the later rows of their block too. Not with `expand` and `tree`.

    Returns (U, N, H), the dtype of query; differentiable once in query, key, value and sinks.
    Raises ValueError if shapes, dtypes or devices do not fit, UserError for a name that is unknown or cannot run here.

    >>> plan = build_prefix_plan([1, 2, 3, 1, 2, 4], [0, 3, 6])
    >>> query, key, value = torch.randn(4, 2, 16), torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    >>> tree_attention(query, key, value, plan).shape
    torch.Size([4, 2, 16])
    """
    layout = plan if isinstance(plan, TreeLayout) else TreeLayout.from_plan(plan).to(query.device)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    options = Options(attention, kernel, factor, softcap, window, both_ways)
    if torch.compiler.is_compiling() and attention != "tree":  # which is compiled by itself
        operator = torch.ops.radixtrain.tree_attention
        out: Tensor = operator(query, key, value, sinks, layout.host, layout.rows, *options)[0]
        return out
    attend = _made_once(_way, query, key, value, sinks, layout, options)
    return attend(query, key, value, sinks_N=sinks)


class Options(NamedTuple):
    """What a layer asks for, as `tree_attention` takes it."""

    attention: str
    kernel: str
    scale: float
    softcap: float | None
    window: int | None
    both_ways: bool


class Request(NamedTuple):
    """What computes an attention.

    both_ways: whether rows see the later ones of their block too. is_plain: whether torch's own attention computes the
    same, and as fast.
    """

    choice: AttentionChoice
    scoring: Scoring
    both_ways: bool
    is_plain: bool


def _made_once(
    make: Callable[[TreeLayout, Request], Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layout: TreeLayout,
    options: Options,
) -> Any:
    """Check what a layer asks for, choose what computes it and make this, once for all layers that ask for the same."""
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    asked = make, options, *map(FORM, tensors)
    made = layout.ways.get(asked)
    if made is None:
        made = layout.ways[asked] = make(layout, _checked(query, key, value, sinks, layout, options))
    return made


def _checked(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: TreeLayout, options: Options
) -> Request:
    attention, kernel, scale, softcap, window, both_ways = options
    _check_tensors(query, key, value, sinks, layout)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no soft-cap; got {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query sees itself), or None for no window; got {window}")
    binds = window is not None and window < layout.max_seqlen
    scoring = Scoring(scale, softcap, window if binds else None)
    both_ways = both_ways and layout.has_blocks
    if both_ways and attention not in ("auto", *WITH_BLOCKS):
        raise UserError(
            f"attention={attention!r} only attends backwards, and the images of this batch attend in both directions: "
            f"use auto, cascade or path"
        )
    choice = _chosen(attention, kernel, query, scoring)
    is_fast = choice.kernel == "torch" or (kernel == "auto" and choice.kernel in AS_FAST_AS_TORCH)
    is_plain = choice.strategy == "cascade" and is_fast and sinks is None and not both_ways and softcap is None
    return Request(choice, scoring, both_ways, is_plain)


def _way(layout: TreeLayout, request: Request) -> Callable[..., Tensor]:
    """Return the function of query, key, value and sinks_N that computes a request."""
    choice, scoring, both_ways, is_plain = request
    if choice.strategy == "tree":
        mask = tree_block_mask(layout.row_subtree_ends, layout.row_depths, scoring.window)
        return partial(flex_tree_attention, mask=mask, scoring=scoring)
    if choice.strategy == "reference":
        return partial(reference_attention, mask_UU=_seen(layout, scoring.window, both_ways), scoring=scoring)
    if is_plain and layout.even_shape is not None:
        return partial(_batched_attention, shape=layout.even_shape, scale=scoring.scale)
    return partial(routed_attention, route=_routed(layout, request))


def _routed(layout: TreeLayout, request: Request) -> Route:
    """Return the pieces that compute a request, and their kernel."""
    choice, scoring, both_ways, _ = request
    kernel = _kernel(choice.kernel, layout.device)
    later = layout.later if both_ways else []
    if choice.strategy == "cascade":
        return Route((*layout.pieces, *later[:1]), kernel, scoring)
    if choice.strategy == "path":
        return Route((layout.paths, *later[1:]), kernel, scoring, layout.path_keys)
    if choice.strategy == "expand":
        return Route((layout.sequences,), kernel, scoring, layout.inverse_indices, layout.gather_indices)
    # A compiled graph has no autograd inside an operator: there the eager kernel computes under the explicit mask.
    hidden = ~_seen(layout, scoring.window, both_ways)
    return Route((_masked(hidden),), kernel, scoring.without_window)


def _masked(hidden: Tensor) -> Piece:
    """Return the call of all queries onto all keys but the hidden ones. hidden: (queries, keys), bool."""
    every = Ragged.whole(hidden.shape[0], hidden.shape[1], hidden.device)
    return Piece(slice(None), slice(None), replace(every, mask=added_to_scores(hidden)))


def _seen(layout: TreeLayout, window: int | None, both_ways: bool) -> Tensor:
    """Return the mask (U, U), bool: which keys each query sees."""
    seen = tree_mask(layout.row_subtree_ends, layout.row_depths, window)
    of_row = layout.block_of_row
    return seen | ((of_row[:, None] == of_row) & (of_row >= 0)).triu(1) if both_ways else seen


# Tree attention as operators of torch, for compiled graphs, which then hold the two tensors of a layout and no number
# of the tree. Eager mode calls the same functions directly, so that profilers and modes of torch see their kernels.
INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
OPTIONS = "str attention, str kernel, float scale, float? softcap, SymInt? window, bool both_ways"
OPERATORS = torch.library.Library("radixtrain", "FRAGMENT")
OPERATORS.define(f"tree_attention({INPUTS}, Tensor host, Tensor rows, {OPTIONS}) -> (Tensor out, Tensor lse)")
OPERATORS.define(
    f"tree_attention_backward(Tensor dout, {INPUTS}, Tensor out, Tensor lse, Tensor host, Tensor rows, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(OPERATORS, "tree_attention", "CompositeExplicitAutograd")
def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, host: Tensor, rows: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    _launches[host.data_ptr()] += 1
    route = _made_once(_routed, query, key, value, sinks, _decoded(host, rows), Options(*options))
    out, lse = route_forward(query, key, value, sinks, route)
    return out.contiguous(), lse.contiguous()


@torch.library.impl(OPERATORS, "tree_attention_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    host: Tensor,
    rows: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Compute the gradients of query, key, value and sinks; the last one is empty without sinks."""
    route = _made_once(_routed, query, key, value, sinks, _decoded(host, rows), Options(*options))
    dq, dk, dv, dsinks = route_backward(dout, query, key, value, sinks, out, lse, route)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dout.new_empty(0) if dsinks is None else dsinks


@torch.library.register_fake("radixtrain::tree_attention", lib=OPERATORS)
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, _ = query.shape
    lse = query.new_empty(num_heads, num_rows, dtype=wide(query))
    return query.new_empty(num_rows, num_heads, value.shape[2]), lse


@torch.library.register_fake("radixtrain::tree_attention_backward", lib=OPERATORS)
def _(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    grads = (x.new_empty(x.shape) for x in (query, key, value))
    return *grads, dout.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[6:]
    ctx.save_for_backward(*inputs[:4], *output, *inputs[4:6])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing gives them only once
    *grads, dsinks = torch.ops.radixtrain.tree_attention_backward(dout, *saved, *ctx.options)
    return *grads, None if saved[3] is None else dsinks, *[None] * (2 + len(ctx.options))


torch.library.register_autograd("radixtrain::tree_attention", _differentiate, setup_context=_save, lib=OPERATORS)
_launches: Counter[int] = Counter()  # by the address of `host`


def launched_in_graphs(layout: TreeLayout) -> int:
    """Return how many times compiled graphs have computed attention with this layout since the last time."""
    return _launches.pop(layout.host.data_ptr(), 0)


@lru_cache(maxsize=8)  # every layer of a pass brings the same two tensors
def _decoded(host: Tensor, rows: Tensor) -> TreeLayout:
    return TreeLayout(host, rows)


@torch.no_grad()
def continued_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    shared: Sequence[Shared],
    *,
    depths: Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute tree attention of rows that continue stored ones. No gradient.

    query, key, value, scale, softcap, window, sinks: as in `tree_attention`. layout: of the new rows.
    shared: what they continue. depths: (U,), int64. the place of each new row in its sequence.

    Returns (U, N, H), the dtype of query.
    """
    if shared and window is not None:
        return _continued_in_window(query, key, value, layout, shared, depths, Scoring(scale, softcap, window), sinks)
    options = Options("auto", "auto", scale, softcap, window, False)
    route = _made_once(_routed, query, key, value, None, layout, options)
    first = route_forward(query, key, value, None, route)
    return merged_pieces(query, first, [each.call for each in shared], route.kernel, route.scoring, sinks)[0]


def _continued_in_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    shared: Sequence[Shared],
    depths: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Attend under an explicit mask, since a window cuts through stored rows."""
    assert scoring.window is not None
    seen = [tree_mask(layout.row_subtree_ends, layout.row_depths, scoring.window)]
    for each in shared:
        places = each.first + torch.arange(len(each.keys), device=query.device)
        is_reader = torch.zeros(len(query), 1, dtype=torch.bool, device=query.device)
        is_reader[each.readers.rows] = True
        seen.append(is_reader & (depths[:, None] - places < scoring.window))
    keys = torch.cat([key, *(each.keys for each in shared)])
    values = torch.cat([value, *(each.values for each in shared)])
    route = Route((_masked(~torch.cat(seen, 1)),), _kernel("eager", query.device), scoring.without_window)
    return route_forward(query, keys, values, sinks, route)[0]


@torch.no_grad()
def decoding_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    mask: Tensor,
    shared: Sequence[Shared],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of the next row of some sequences. No gradient.

    query: (B, N, H). own: keys and values of the sequences, (B, J, K, H) each.
    mask: (B, 1, 1, J), as in `attention_to_own`. shared: what several of them see whole.
    scale, softcap, sinks: as in `tree_attention`.

    Returns (B, N, H), the dtype of query.
    """
    scoring = Scoring(scale, softcap)
    kernel = _kernel(_chosen("auto", "auto", query, scoring).kernel, query.device)
    first = attention_to_own(query, *own, mask, kernel, scoring)
    return merged_pieces(query, first, [each.call for each in shared], kernel, scoring, sinks)[0]


def _batched_attention(
    query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int], scale: float, sinks_N: None
) -> Tensor:
    """Attend within sequences of one length that share nothing: a batch takes 0.5 to 0.65 of the time of rows."""
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _chosen(attention: str, kernel: str, query: Tensor, scoring: Scoring) -> AttentionChoice:
    """Choose the strategy and kernel for these scores, which are logged once, in one line; as a warning if slow."""
    form, modifiers = (query.device, query.dtype, query.shape[-1]), (scoring.softcap, scoring.window)
    choice = choose_attention(attention, kernel, *form, *(each is not None for each in modifiers))
    if choice[:2] not in _LOGGED:
        _LOGGED.add(choice[:2])
        logger.log(logging.WARNING if choice.is_slow else logging.INFO, "%s", choice)
    return choice


@lru_cache(maxsize=64)  # every layer requests the same
def choose_attention(
    attention: str,
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: bool = False,
    window: bool = False,
) -> AttentionChoice:
    """Resolve `auto`, or check what was requested by name.

    softcap, window: as in `KernelCall`.

    Raises UserError for an unknown name, for a named kernel that is not installed or does not take this device, dtype,
    head dim or modifier, for `cascade` if a window binds, and for what `tree` does not take.
    """
    call = KernelCall(device, dtype, head_dim, softcap, window)
    if attention not in ("auto", *STRATEGIES):
        raise UserError(f"attention must be auto, {', '.join(STRATEGIES)}; got {attention!r}")
    if kernel not in ("auto", *KERNELS):
        raise UserError(f"kernel must be auto, {', '.join(KERNELS)}; got {kernel!r}")
    if attention == "reference":
        return AttentionChoice(attention, "eager", "explicit mask, by request")
    if attention == "tree":
        _check_tree(kernel, call)
        return AttentionChoice(attention, "flex_attention", "one call with a mask, by request")
    if attention == "cascade" and call.window:
        raise UserError(
            "attention='cascade' cannot be used: it attends to a prompt in one piece, and a sliding window shorter "
            "than the batch's longest sequence cuts through it; attention='auto' or 'path' keeps the window"
        )
    strategy, why = attention, "as chosen"
    if attention == "auto":
        strategy = "path" if call.window else "cascade"
        why = "a sliding window binds, which cascade cannot keep" if call.window else "no row is copied"
    name, why_kernel = _choose_kernel(kernel, call)
    is_slow = call.device.type == "cuda" and kernel == "auto" and name == "eager"
    reason = f"{strategy}: {why}; {name}: {why_kernel}{_EAGER_ON_CUDA if is_slow else ''}"
    return AttentionChoice(strategy, name, reason, is_slow)


def _check_tree(kernel: str, call: KernelCall) -> None:
    if kernel != "auto":
        raise UserError(
            f"kernel={kernel!r} cannot be used: attention='tree' has its own kernel; leave kernel at 'auto'"
        )
    refusal = flex_refusal(call)
    if refusal:
        raise UserError(f"attention='tree' cannot be used: {refusal}; attention='auto' takes one that can")


def _choose_kernel(kernel: str, call: KernelCall) -> tuple[str, str]:
    """Return the name of a kernel and why: the first preferred one that can run the call, or the one requested."""
    if kernel != "auto":
        refusal = varlen_refusal(kernel, call)
        if refusal:
            raise UserError(f"kernel={kernel!r} cannot be used: {refusal}; kernel='auto' takes one that can")
        return kernel, "as chosen"
    preferred = PREFERRED_ON_CUDA if call.device.type == "cuda" else ("torch", "eager")
    passed_over = ""
    for name in preferred:
        refusal = varlen_refusal(name, call)
        if refusal is None:
            break
        passed_over += f", {name} {refusal}"
    return name, f"on {call.device.type}{passed_over}"


@lru_cache(maxsize=16)
def _kernel(name: str, device: torch.device) -> VarlenKernel:
    return varlen_kernel(name, device)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: TreeLayout) -> None:
    num_rows, device = layout.num_rows, layout.device
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3 or tensor.shape[0] != num_rows:
            raise ValueError(
                f"{name} must be (U, heads, head_dim) with U = {num_rows} rows, the plan's; got {tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on {query.device}")
    if device != query.device:
        raise ValueError(f"the plan is on {device}, query on {query.device}; move it with TreeLayout.to(device)")
    if key.shape[:2] != value.shape[:2] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"heads of query must be a multiple of those of key and value: "
            f"got {query.shape[1]}, {key.shape[1]} and {value.shape[1]}"
        )
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise ValueError(f"head_dim must agree, got {query.shape[2]}, {key.shape[2]} and {value.shape[2]}")
    if not query.dtype.is_floating_point:
        raise ValueError(f"query, key and value must be floating point, got {query.dtype}")
    if sinks is None:
        return
    if sinks.shape != (query.shape[1],) or not sinks.dtype.is_floating_point:
        raise ValueError(
            f"sinks must be ({query.shape[1]},), one floating-point logit for each query head; got "
            f"{tuple(sinks.shape)}, {sinks.dtype}"
        )
    if sinks.device != query.device:
        raise ValueError(f"sinks are on {sinks.device}, query on {query.device}")
