"""The rates of a machine, measured: what the calls, pairs and elements of attention cost here, in seconds.

A few small batches (nothing shared, one prompt, a deep tree, accidental sharing) are timed under every strategy,
forward and backward. The rates of `radixtrain/tree/cost_model.py` are fitted to the times by least squares of the
relative errors, none below 0.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from radixtrain.attention import tree_attention
from radixtrain.hf.layer_kinds import ALIKE, LayerKinds
from radixtrain.hf.shape import ModelDimensions
from radixtrain.kernels.cascade import BUNDLE
from radixtrain.kernels.cpu_loops import LONG, STRIP
from radixtrain.tree.cost_model import CHOICES, Rates, StepCost, attention_work
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["Layer", "fastest", "measured_rates", "non_negative_fit"]

REPEATS = 4  # keep the minimum: other load can only slow a run down
VERSION = 2  # of the file
FREE = Rates(call=0.0, rectangle=0.0, pair=0.0, element=0.0, flop=0.0)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a model on a machine: all that the rates depend on.

    kernel: name of the kernel that runs attention; not `auto`.
    kinds: what the mean layer has, if layers differ.
    mixers: a recurrent mixer of each kind, and how many of it the model has.
    """

    model: ModelDimensions
    device: torch.device
    dtype: torch.dtype
    kernel: str
    kinds: LayerKinds = ALIKE
    mixers: Sequence[tuple[nn.Module, int]] = ()

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    @property
    def num_heads(self) -> int:
        return self.model.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.model.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.model.widest_head_dim

    @property
    def intermediate_size(self) -> int:
        """4 x hidden_size, as in most models, if the configuration does not say it."""
        return self.model.intermediate_size or 4 * self.model.hidden_size

    @property
    def key(self) -> dict[str, Any]:
        """What the rates of attention depend on. It names their file: if any of it changes, they are measured again."""
        return {
            "version": VERSION,
            "machine": _processor() if self.on_host else torch.cuda.get_device_name(self.device),
            "blocks": [STRIP, LONG, BUNDLE],
            "threads": torch.get_num_threads() if self.on_host else None,
            "torch": torch.__version__,
            "kernel": self.kernel,
            "dtype": str(self.dtype),
            "heads": [self.num_heads, self.num_key_value_heads, self.head_dim],
            "hidden": [self.model.hidden_size, self.intermediate_size],
        }

    def cost(self, rates: Rates, strategies: tuple[str, ...] = CHOICES) -> StepCost:
        attention = self.kinds.attention * self.model.attention_parameters
        parameters = attention + self.kinds.mlps * self.model.mlp_parameters(self.intermediate_size)
        return StepCost(
            rates=rates,
            on_host=self.on_host,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            row_flops=6.0 * parameters,
            strategies=strategies,
            attention_share=self.kinds.attention,
            mixer_share=self.kinds.mixers,
        )

    def random_options(self) -> dict[str, Any]:
        """For `torch.randn`, with a generator of its own, so that measuring does not move the seed of a run."""
        return {"device": self.device, "dtype": self.dtype, "generator": torch.Generator(self.device).manual_seed(0)}


def measured_rates(layer: Layer) -> tuple[Rates, float]:
    """The rates, and how far they are from what was measured: root mean square of the relative errors."""
    cost = layer.cost(FREE)
    rows, seconds = [], []
    for plan in _batches():
        run = _attention_step(layer, TreeLayout.from_plan(plan).to(layer.device))
        for strategy in CHOICES:
            rows.append(cost.counts(attention_work(plan, strategy, layer.on_host)))
            seconds.append(fastest(partial(run, strategy), layer.device))
    counts = np.array(rows, dtype=np.float64)
    call, rectangle, pair, element = fitted = non_negative_fit(counts, np.array(seconds))
    error = float(np.sqrt(np.square(counts @ np.array(fitted) / seconds - 1).mean()))
    flop = _seconds_per_flop(layer)
    return Rates(call=call, rectangle=rectangle, pair=pair, element=element, flop=flop), error


def _batches() -> Iterator[PrefixPlan]:
    """Nothing shared, in long and in short sequences; one prompt; a deep tree; accidental sharing."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return rng.integers(100, 10_000, length).tolist()

    trunk = ids(384)
    yield _plan([ids(256), ids(250), ids(131)])
    yield _plan([ids(int(length)) for length in rng.integers(4, 40, 48)])
    yield _plan([trunk + ids(int(length)) for length in rng.integers(8, 64, 24)])
    yield _plan([trunk[: 24 * (n + 1)] + ids(12) for n in range(16)])
    yield _plan([[int(token) for token in rng.integers(0, 4, 3)] + ids(24) for _ in range(48)])


def _plan(sequences: list[list[int]]) -> PrefixPlan:
    bounds = np.cumsum([0, *map(len, sequences)])
    return build_prefix_plan(np.concatenate([np.array(ids) for ids in sequences]), bounds)


def _attention_step(layer: Layer, layout: TreeLayout) -> Callable[[str], None]:
    """Attention of random rows, forward and backward, by strategy."""
    heads = layer.num_heads, layer.num_key_value_heads, layer.num_key_value_heads
    options = layer.random_options()
    q, k, v = (torch.randn(layout.num_rows, n, layer.head_dim, **options).requires_grad_() for n in heads)
    dout = torch.randn(q.shape, **options)

    def run(strategy: str) -> None:
        out = tree_attention(q, k, v, layout, attention=strategy, kernel=layer.kernel)
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def _seconds_per_flop(layer: Layer, rows: int = 512) -> float:
    """Measured on a linear layer as wide as the model's, forward and backward."""
    options, hidden, width = layer.random_options(), layer.model.hidden_size, layer.intermediate_size
    x = torch.randn(rows, hidden, **options).requires_grad_()
    weight = torch.randn(width, hidden, **options).requires_grad_()
    dout = torch.randn(rows, width, **options)

    def run() -> None:
        torch.autograd.grad(nn.functional.linear(x, weight), (x, weight), dout)

    return fastest(run, layer.device) / (6.0 * rows * hidden * width)


def fastest(run: Callable[[], None], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of `repeats` runs, after one that does not count."""
    seconds = []
    for _ in range(1 + repeats):
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def non_negative_fit(work: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Rates >= 0 with the least squares of `work @ rates / seconds - 1`: the best of every set of rates above 0."""
    relative, ones = work / seconds[:, None], np.ones(len(seconds))
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1
    best, least = np.zeros(work.shape[1]), np.inf
    for size in range(1, work.shape[1] + 1):
        for chosen in map(list, combinations(range(work.shape[1]), size)):
            rates, *_ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], ones, rcond=None)
            error = float(np.square(relative[:, chosen] / scale[chosen] @ rates - 1).sum())
            if (rates >= 0).all() and error < least:
                best, least = np.zeros(work.shape[1]), error
                best[chosen] = rates / scale[chosen]
    return [float(rate) for rate in best]


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(errors="replace").splitlines() if described.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, f"{platform.machine()} {platform.node()}")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
