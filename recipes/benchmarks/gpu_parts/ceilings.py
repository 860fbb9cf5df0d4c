"""What the card can do: a copy, a matrix product, and attention of every kernel. Times of a step are judged by these.

Attention is causal, of 16 sequences of 2,304 tokens with the heads of Qwen3-4B: `sdpa` on each backend
by name, and the varlen kernels of `radixtrain/kernels`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_parts.arms import BACKENDS
from gpu_parts.attention import SLOW
from gpu_parts.run import Run, median_seconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from radixtrain.kernels.merge_attention import Piece, Route, routed_attention
from radixtrain.kernels.varlen import KERNELS, KernelCall, varlen_kernel, varlen_refusal
from radixtrain.kernels.varlen_args import Ragged, Scoring

__all__ = ["SIZES", "TINY_SIZES", "ceilings"]


class Sizes(NamedTuple):
    """num_bytes: of a copy. side: of square matrices. The others are of attention."""

    num_bytes: int
    side: int
    batch: int
    length: int
    heads: int
    key_heads: int
    head_dim: int

    @property
    def operations(self) -> float:
        """Of causal attention, forward."""
        return 4 * self.heads * self.head_dim * self.batch * self.length * (self.length + 1) / 2


SIZES, TINY_SIZES = Sizes(2**32, 8192, 16, 2304, 32, 8, 128), Sizes(2**20, 128, 2, 64, 4, 2, 16)


def ceilings(run: Run, sizes: Sizes) -> None:
    """Terabytes a second, read and written, and teraflops a second."""
    if not run.has_time("ceilings"):
        return
    source = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=run.device)
    seconds = median_seconds(partial(torch.empty_like(source).copy_, source), run.device)
    run.found("ceilings", "copy", terabytes_per_second=2 * sizes.num_bytes / seconds / 1e12)
    del source
    x, w = (torch.randn(sizes.side, sizes.side, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_seconds(partial(torch.mm, x, w), run.device)
    run.found("ceilings", f"matrices of {sizes.side}", teraflops_per_second=2 * sizes.side**3 / seconds / 1e12)
    qkv = [
        torch.randn(sizes.batch, sizes.length, n, sizes.head_dim, device=run.device, dtype=torch.bfloat16)
        for n in (sizes.heads, sizes.key_heads, sizes.key_heads)
    ]
    for name, attend in _ways(run, sizes):
        if not run.has_time(f"ceilings {name}"):
            return
        try:
            run.found("ceilings", name, **_rates(run, attend, qkv, sizes))
        except Exception as error:  # a kernel's
            run.leave_out(f"ceilings {name}", error)


def _rates(run: Run, attend: Callable[..., Tensor], qkv: list[Tensor], sizes: Sizes) -> dict[str, float]:
    leaves = [x.requires_grad_() for x in qkv]
    dout = torch.ones_like(leaves[0])
    with torch.no_grad():
        forward = median_seconds(lambda: attend(*leaves), run.device)
    step = median_seconds(lambda: torch.autograd.grad(attend(*leaves), leaves, dout), run.device)
    return {
        "forward_teraflops_per_second": sizes.operations / forward / 1e12,
        "step_teraflops_per_second": 3.5 * sizes.operations / step / 1e12,
    }


def _ways(run: Run, sizes: Sizes) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Functions of q, k and v, (B, L, heads, H)."""
    for name, backend in BACKENDS.items():
        if run.device.type == "cuda" or name != "cudnn":
            yield f"sdpa, {name}", partial(_sdpa, backend=backend)
    bounds = torch.arange(0, (sizes.batch + 1) * sizes.length, sizes.length, dtype=torch.int32, device=run.device)
    ragged = Ragged(bounds, bounds, sizes.length, sizes.length, causal=True)
    for name in (name for name in KERNELS if name not in SLOW):
        if refusal := varlen_refusal(name, KernelCall(run.device, torch.bfloat16, sizes.head_dim)):
            run.leave_out(f"ceilings {name}", refusal)
            continue
        yield f"varlen, {name}", partial(_varlen, ragged=ragged, kernel=varlen_kernel(name, run.device))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, kernel: Any) -> Tensor:
    everything = [Piece(slice(None), slice(None), ragged)]
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return routed_attention(*rows, Route(everything), kernel, Scoring(q.shape[-1] ** -0.5)).view_as(q)
