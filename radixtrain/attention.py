"""The one door to the kernels: validates, chooses, dispatches. An explicit request that cannot be met raises.

| strategy    | queries       | keys and values          | calls                      | a window that binds |
|-------------|---------------|--------------------------|----------------------------|---------------------|
| `reference` | U             | U, explicit mask         | eager; the specification   | yes                 |
| `expand`    | scatter to T  | T                        | one varlen call            | yes                 |
| `path`      | U             | root paths, gathered     | one varlen call            | yes                 |
| `cascade`   | U, no copies  | U, no copies             | one, and one a tree level  | no                  |

Sinks go with every strategy and kernel, a soft-cap with every strategy and the kernels that compute it
(`kernels/varlen.py`). A window binds where it is shorter than the longest sequence; any other is as none.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from radixtrain.kernels.cascade import cascade_attention
from radixtrain.kernels.expand import expand_attention
from radixtrain.kernels.flash import FLASH_3_MAX_HEAD_DIM, flash_3_missing, takes_window
from radixtrain.kernels.path import path_attention
from radixtrain.kernels.ragged import VarlenKernel
from radixtrain.kernels.reference import reference_attention, tree_mask
from radixtrain.kernels.scoring import Scoring
from radixtrain.kernels.varlen import KERNELS, varlen_kernel
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

__all__ = ["STRATEGIES", "AttentionChoice", "choose_attention", "tree_attention"]

STRATEGIES = ("cascade", "path", "expand", "reference")
FLASH_MAX_HEAD_DIM = 256
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionChoice:
    """What runs, and why: `str()` is the line that is logged."""

    strategy: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"attention={self.strategy}, kernel={self.kernel} ({self.reason})"


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
) -> Tensor:
    """Attention on unique tokens: every query sees the keys of its own root path, itself included.

    query: (U, N, H), float64, float32, bfloat16 or float16.
    key, value: (U, K, H), same dtype and device; N is a multiple of K (grouped-query attention).
    plan: the prefix plan of these U rows. A `TreeLayout` on the device of the tensors saves the copy.
    attention: `auto`, `cascade`, `path`, `expand` or `reference`. `auto` is `cascade`, or `path` where a window binds.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3` or `eager`; not used by `reference`.
    scale: factor on the scores; default `H ** -0.5`.
    softcap: None, or c: scaled scores s become `c * tanh(s / c)`.
    window: None, or w: a query sees the last w tokens of its path, itself included, counted in tokens.
    sinks: None, or (N,), floating point. A logit for every query of a head that has no value.

    Returns (U, N, H), the dtype of query; differentiable once in query, key, value and sinks.
    Raises ValueError where shapes, dtypes or devices do not fit, or what was asked for by name cannot be had.
    """
    layout = plan if isinstance(plan, TreeLayout) else TreeLayout.from_plan(plan).to(query.device)
    _check_tensors(query, key, value, layout)
    _check_modifiers(query, softcap, window, sinks)
    binding = window if window is not None and window < layout.max_seqlen else None
    where = query.device, query.dtype, query.shape[-1]
    choice = choose_attention(attention, kernel, *where, softcap=softcap is not None, window=binding is not None)
    scoring = Scoring(query.shape[-1] ** -0.5 if scale is None else scale, softcap, binding)
    if choice.strategy == "reference":
        mask = tree_mask(layout.row_subtree_ends, layout.row_depths, binding)
        return reference_attention(query, key, value, mask, scoring, sinks)
    varlen = _kernel(choice.kernel, query.device)
    if choice.strategy == "cascade":
        apart = query.device.type == "cpu" and not _all_finite(key, value)
        pieces = layout.separate_pieces if apart else layout.pieces
        return cascade_attention(query, key, value, pieces, varlen, scoring, sinks)
    if choice.strategy == "path":
        return path_attention(query, key, value, layout.path_keys, layout.paths, varlen, scoring, sinks)
    indices = layout.inverse_indices, layout.gather_indices
    return expand_attention(query, key, value, *indices, layout.sequences, varlen, scoring, sinks)


@lru_cache(maxsize=64)
def choose_attention(
    attention: str, kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int,
    *, softcap: bool = False, window: bool = False,
) -> AttentionChoice:  # fmt: skip
    """Resolve `auto`, or check what was asked for by name. Each new choice is logged once, in one line.

    softcap, window: whether scores are soft-capped, and whether a sliding window binds.

    Raises ValueError for an unknown name, for a named kernel that is not installed or does not take this device, dtype,
    head dim or modifier, and for `cascade` where a window binds.
    """
    if attention not in ("auto", *STRATEGIES):
        raise ValueError(f"attention must be auto, {', '.join(STRATEGIES)}; got {attention!r}")
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be auto, {', '.join(KERNELS)}; got {kernel!r}")
    if attention == "reference":
        choice = AttentionChoice(attention, "none", "explicit mask, by request")
    else:
        strategy, why = _choose_strategy(attention, window)
        name, why_kernel = _choose_kernel(kernel, _Call(device, dtype, head_dim, softcap, window))
        choice = AttentionChoice(strategy, name, f"{strategy}: {why}; {name}: {why_kernel}")
    logger.info("%s", choice)
    return choice


@dataclass(frozen=True)
class _Call:
    """What a kernel has to take."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    softcap: bool
    window: bool


def _choose_strategy(attention: str, window: bool) -> tuple[str, str]:
    """Name and reason, or ValueError."""
    if attention == "cascade" and window:
        raise ValueError(
            "attention='cascade' cannot be used: it attends to a prompt in one piece, and a sliding window shorter "
            "than the batch's longest sequence cuts through it; attention='auto' or 'path' keeps the window"
        )
    if attention != "auto":
        return attention, "by request"
    return ("path", "a sliding window binds, which cascade cannot keep") if window else ("cascade", "no row is copied")


def _choose_kernel(kernel: str, call: _Call) -> tuple[str, str]:
    """Name and reason. The first of the preferred kernels that can run there, or the one asked for, or ValueError."""
    if kernel != "auto":
        refusal = _refusal(kernel, call)
        if refusal:
            raise ValueError(f"kernel={kernel!r} cannot be used: {refusal}; kernel='auto' takes what can")
        return kernel, "by request"
    preferred = ("flash_attn_3", "flash_attn", "torch", "eager") if call.device.type == "cuda" else ("torch", "eager")
    refusals = {name: _refusal(name, call) for name in preferred}
    name = next(name for name in preferred if refusals[name] is None)
    passed_over = [f"{other} {refusal}" for other, refusal in refusals.items() if refusal]
    return name, f"on {call.device.type}" + "".join(f", {text}" for text in passed_over)


def _refusal(kernel: str, call: _Call) -> str | None:
    """Why this kernel cannot run there, or None."""
    if kernel == "eager":
        return None
    if kernel == "torch" and call.softcap:
        return "computes no soft-cap"
    if kernel == "torch" and call.device.type == "cpu":
        return None
    if call.device.type != "cuda":
        return f"needs CUDA, the tensors are on {call.device.type}"
    if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install 'radixtrain[flash]', needs a CUDA toolchain)"
    if kernel == "flash_attn_3" and (missing := flash_3_missing(call.device)):
        return missing
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {call.dtype}"
    widest = FLASH_3_MAX_HEAD_DIM if kernel == "flash_attn_3" else FLASH_MAX_HEAD_DIM
    if call.head_dim > widest or call.head_dim % 8:
        return f"takes head dims that are multiples of 8 up to {widest}, got {call.head_dim}"
    if kernel == "torch" and call.window and not takes_window():
        return f"takes no sliding window in torch {torch.__version__}"
    return None


@lru_cache(maxsize=16)
def _kernel(name: str, device: torch.device) -> VarlenKernel:
    return varlen_kernel(name, device)


def _all_finite(key: Tensor, value: Tensor) -> bool:
    """Whether a mask hides what it should: 0 x NaN is NaN, so a row that broke would break those that share its block.

    A sum is one pass and carries what is not finite; one that overflows costs time and nothing else.
    """
    return bool(torch.isfinite(key.sum() + value.sum()))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3 or tensor.shape[0] != layout.num_rows:
            raise ValueError(
                f"{name} must be (U, heads, head_dim) with U = {layout.num_rows} rows, the plan's; got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on {query.device}")
    if layout.device != query.device:
        raise ValueError(f"the plan is on {layout.device}, query on {query.device}; move it with TreeLayout.to(device)")
    if key.shape[:2] != value.shape[:2] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"heads of query must be a multiple of those of key and value: "
            f"got {query.shape[1]}, {key.shape[1]} and {value.shape[1]}"
        )
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise ValueError(f"head_dim must agree, got {query.shape[2]}, {key.shape[2]} and {value.shape[2]}")
    if not query.dtype.is_floating_point:
        raise ValueError(f"query, key and value must be floating point, got {query.dtype}")


def _check_modifiers(query: Tensor, softcap: float | None, window: int | None, sinks: Tensor | None) -> None:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no soft-cap; got {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query sees itself), or None for no window; got {window}")
    if sinks is None:
        return
    if sinks.shape != (query.shape[1],) or not sinks.dtype.is_floating_point:
        raise ValueError(
            f"sinks must be ({query.shape[1]},), one floating-point logit a query head; got {tuple(sinks.shape)}, "
            f"{sinks.dtype}"
        )
    if sinks.device != query.device:
        raise ValueError(f"sinks are on {sinks.device}, query on {query.device}")
