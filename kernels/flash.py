"""Varlen kernels for CUDA: flash-attention and cuDNN in torch, and the packages flash-attn (2), -3 and -4.

Legend in `varlen_args.py`. All are bottom-right causal, take grouped heads, and need a last axis without gaps. For a
query without a key all but version 4 return a log-sum-exp of +inf, not -inf; our pieces have no such query or entry.

The packages are asked to add in a fixed order in the backward pass. The kernel inside torch adds dq with atomics.
`varlen.py` says what a machine needs for each.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixtrain.kernels.varlen_args import Ragged, Scoring

aten = torch.ops.aten
WIDEST_HEAD_DIM = 256
FLASH_3_WIDEST_HEAD_DIM = 192  # its backward in a fixed order rounds wider heads up to 256, and refuses those
FLASH_4_WIDEST_HEAD_DIM_ON_BLACKWELL = 128  # then only 256, and that without a soft-cap
OLDEST_CUDNN = 91500  # from here on torch itself prefers it on Hopper; the backward of 9.10.0 and 9.10.1 was wrong
ROWS = 512
# Arguments of `flash_attn_3::fwd` for caches, pages, rotary embeddings and 8-bit inputs. Older builds have no defaults.
FLASH_3_UNUSED = (
    *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx"),
    *("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
)


class TorchCUDAKernel:
    """`aten._flash_attention_forward` / `_backward`: flash-attention 2 as built into torch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            *_contiguous(q, k, v),
            *ragged.arguments,
            0.0,  # dropout
            ragged.causal,
            False,  # no debug mask
            scale=scoring.scale,
            **self._window(ragged, scoring),
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the philox state, unread without dropout
        return aten._flash_attention_backward(
            *_contiguous(dout, q, k, v, out),
            lse.contiguous(),
            *ragged.arguments,
            0.0,  # dropout
            ragged.causal,
            no_dropout,
            no_dropout,
            scale=scoring.scale,
            **self._window(ragged, scoring),
        )

    def _window(self, ragged: Ragged, scoring: Scoring) -> dict[str, int]:
        """Return the window arguments; none without a window."""
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        return {} if scoring.window is None else {"window_size_left": scoring.window - 1, "window_size_right": 0}


class _Packaged:
    """A package of which both functions take the same arguments by name.

    attend, differentiate: the functions. The second fills gradients that it receives after the log-sum-exp.
    causal: the name of that argument. in_forward, in_backward: further arguments.
    """

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    causal = "causal"
    in_forward: ClassVar[dict[str, Any]] = {}
    in_backward: ClassVar[dict[str, Any]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.attend(*_contiguous(q, k, v), **self._by_name(ragged, scoring), **self.in_forward)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        tensors = *_contiguous(dout, q, k, v, out), lse.contiguous(), dq, dk, dv
        self.differentiate(*tensors, **self._by_name(ragged, scoring), **self.in_backward, deterministic=True)
        return dq, dk, dv

    def _by_name(self, ragged: Ragged, scoring: Scoring) -> dict[str, Any]:
        """Return bounds and scoring: the keys on either side of a query's own, -1 for all; 0 for no soft-cap."""
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", self.causal)
        left, right = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
        scores = {"softmax_scale": scoring.scale, "softcap": scoring.softcap or 0.0}
        bounds = dict(zip(names, (*ragged.arguments, ragged.causal), strict=True))
        return {**bounds, **scores, "window_size_left": left, "window_size_right": right}


class FlashAttnKernel(_Packaged):
    """The flash-attn package, version 2 (`flash_attn.flash_attn_interface`)."""

    in_forward: ClassVar = {"dropout_p": 0.0}
    in_backward: ClassVar = {"dropout_p": 0.0, "alibi_slopes": None}

    def __init__(self) -> None:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        self.attend = interface._flash_attn_varlen_forward
        self.differentiate = interface._flash_attn_varlen_backward


class FlashAttn3Kernel(_Packaged):
    """The flash-attn-3 package, for Hopper: the operators that `flash_attn_3._C` registers with torch.

    They are called by the names of their schema, which builds share. The functions above them in
    `flash_attn_interface` have changed: `window_size` is two numbers now, and `causal` is `is_causal`.

    Builds from before Dao-AILab/flash-attention#1893 (September 2025) add in no fixed order, whatever is requested.
    """

    causal = "is_causal"
    # `num_splits` 0 would let it split the keys, and merge them in a second pass.
    in_forward: ClassVar = {**dict.fromkeys(FLASH_3_UNUSED), "num_splits": 1}
    in_backward: ClassVar = {"seqused_q": None, "seqused_k": None}

    def __init__(self) -> None:
        importlib.import_module("flash_attn_3._C")
        self.attend, self.differentiate = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd


class FlashAttn4Kernel(_Packaged):
    """The flash-attn-4 package, for Hopper and Blackwell, written in CuTe: `flash_attn.cute.interface`.

    It compiles at the first call of a kind, 5 to 20 s for both directions: dtype, head dim, query heads for each key
    head, causal or not, with a window or not, the soft-cap, whether the longest entry fits one tile of 64 to 192 rows,
    and whether there are more than 256 entries. `recipes/benchmarks/flash4.py` compiles ahead. What follows the tensors
    goes by name, and only the first values are read: order and number change from release to release.
    """

    in_forward: ClassVar = {"num_splits": 1, "return_lse": True}

    def __init__(self) -> None:
        interface = importlib.import_module("flash_attn.cute.interface")
        self.attend, self.differentiate = interface._flash_attn_fwd, interface._flash_attn_bwd

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = *_contiguous(q, k, v, out, dout), lse.contiguous()
        dq, dk, dv, *_ = self.differentiate(*tensors, **self._by_name(ragged, scoring), deterministic=True)
        return dq, dk, dv


class CudnnKernel:
    """cuDNN's dense attention for calls whose entries are equally long, such as the level of a single prompt; Hopper.

    `aten._scaled_dot_product_cudnn_attention` / `_backward`; torch's flash kernels compute the other calls. E entries.
    It takes (E, heads, rows, head dim) and grouped heads. The log-sum-exp is natural, float32, (E, N, T, 1). In the
    graph of its backward the output and the log-sum-exp are inputs: it computes `delta = rowsum(dout * out)` and `p =
    exp(scores - lse)` (nodes `mul_dO_O` and `sub_s_m` of `CompositeSDPABackwardNode` in cudnn-frontend). So a merged
    out and lse give a piece's share, and torch's own ring attention
    (`distributed/tensor/experimental/_context_parallel`) hands it just those.

    torch builds one plan for each shape and layout of q, k and v, and keeps it; it does not compare the layouts of out
    and dout, so here all tensors are contiguous. A plan for a new number of queries or keys took about 0.07 s in each
    direction on an H100 (200 levels of a comb). So a single entry is padded to a multiple of `ROWS` queries. `auto`
    does not take it: a prompt of another length in every batch would be planned every time, and waiting until a length
    comes again would make the bits of a step depend on the steps before it, which a resumed run does not have.

    Padding queries are zeros after the others. Their dout and out are zeros too, so that they add nothing to dk and dv.
    A causal entry gets padding keys as well, which only they see.
    """

    other = TorchCUDAKernel()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        padding = _padding(q, k, ragged, scoring)
        if padding is None:
            return self.other.forward(q, k, v, ragged, scoring)
        number, extra_q, extra_k = padding
        out_ENTH, lse_ENT1, *_ = aten._scaled_dot_product_cudnn_attention(
            _batched(q, number, extra_q),
            *(_batched(x, number, extra_k) for x in (k, v)),
            None,  # bias
            True,  # the log-sum-exp too
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        lse_ENT = lse_ENT1[:, :, : ragged.max_seqlen_q, 0]
        return _rows(out_ENTH, ragged.max_seqlen_q), lse_ENT.transpose(0, 1).flatten(1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        padding = _padding(q, k, ragged, scoring)
        if padding is None:
            return self.other.backward(dout, q, k, v, out, lse, ragged, scoring)
        number, extra_q, extra_k = padding
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # the philox state, unread without dropout
        dout, q, out = (_batched(x, number, extra_q) for x in (dout, q, out))
        k, v = (_batched(x, number, extra_k) for x in (k, v))
        lse_ENT = pad(lse.unflatten(1, (number, -1)).transpose(0, 1), (0, extra_q)).contiguous()
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse_ENT[..., None]),
            no_dropout,
            no_dropout,
            *(None, None, None),  # bias, bounds of nested tensors
            *(q.shape[2], k.shape[2]),
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        return _rows(dq, ragged.max_seqlen_q), _rows(dk, ragged.max_seqlen_k), _rows(dv, ragged.max_seqlen_k)


def widest_head_dim(kernel: str, device: torch.device) -> int:
    """Return the widest head that a flash kernel takes on a CUDA device; it takes smaller multiples of 8 too."""
    if kernel == "flash_attn_3":
        return FLASH_3_WIDEST_HEAD_DIM
    if kernel == "flash_attn_4" and torch.cuda.get_device_capability(device)[0] > 9:
        return FLASH_4_WIDEST_HEAD_DIM_ON_BLACKWELL
    return WIDEST_HEAD_DIM


def cudnn_missing(device: torch.device) -> str | None:
    """Return what cuDNN's attention lacks on a CUDA device, in the words of an error; None if nothing."""
    if unfit := unfit_device((9,), device):
        return unfit
    version = torch.backends.cudnn.version() or 0
    if version < OLDEST_CUDNN:
        return f"needs cuDNN 9.15 or newer, torch brings {version}"
    if torch.are_deterministic_algorithms_enabled():
        return "adds up in no fixed order, but torch.use_deterministic_algorithms(True) requires one"
    if os.getenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE"):
        return "lays out the log-sum-exp differently under TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
    return None


def unfit_device(majors: tuple[int, ...], device: torch.device) -> str | None:
    """Say why a CUDA device has none of these compute capabilities, in the words of an error; None if it has one."""
    fit = f"needs a GPU of compute capability {' or '.join(f'{major}.x' for major in majors)}"
    if not torch.cuda.is_available():
        return f"{fit}, and torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in majors else f"{fit}, this one has {major}.{minor}"


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    """Return rows without gaps in their last axis."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _batched(x: Tensor, number: int, extra: int) -> Tensor:
    """Return (E, heads, rows, H) in (E, rows, heads, H) memory, with so many rows of zeros after those of each."""
    x = x.unflatten(0, (number, -1))
    return (pad(x, (0, 0, 0, 0, 0, extra)) if extra else x.contiguous()).transpose(1, 2)


def _rows(x: Tensor, length: int) -> Tensor:
    """Return (E, heads, rows, H) without padding as (rows, heads, H)."""
    return x.transpose(1, 2)[:, :length].flatten(0, 1)


def _padding(q: Tensor, k: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[int, int, int] | None:
    """Return how many entries cuDNN gets, and how many queries and keys pad each; None if it does not get the call.

    It takes equal entries with more than one key, and counts queries from the top left. Several are not padded:
    short ones would be twice as long.
    """
    assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
    number, num_q, num_k = len(ragged.cu_seqlens_q) - 1, ragged.max_seqlen_q, ragged.max_seqlen_k
    is_even = (len(q), len(k)) == (number * num_q, number * num_k) and num_q > 0 and num_k > 1
    if not is_even or scoring.window is not None or (ragged.causal and num_q != num_k):
        return None
    extra_q = -num_q % ROWS if number == 1 else 0
    return number, extra_q, extra_q if ragged.causal else 0
