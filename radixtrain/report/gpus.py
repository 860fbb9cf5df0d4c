"""What an epoch would take on GPUs that are not here, by arithmetic: operations divided by the device's peak.

This is not a measurement. No run reaches the peak, and memory traffic, the optimizer
and the cut that fits the device are left out. The ratio of both arms depends on none of this.

Peaks are those of dense matrix products in bfloat16 with float32 sums, without sparsity, from the makers' data sheets:
NVIDIA's for the H100 and H200 (SXM), B200 (HGX, per GPU), A100 (80 GB, SXM), L40S, L4 and A10; its Ada architecture
whitepaper for the GeForce RTX 4090 (with float32 sums); AMD's for the Instinct MI300X.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from radixtrain.bench.flops import ordinary_flops, unique_flops
from radixtrain.report.contents import GpuEstimate
from radixtrain.report.sharing import SampledSteps

__all__ = ["GPUS", "Gpu", "gpu_estimates"]

PASSES = 3  # a backward pass costs twice a forward pass


class Gpu(NamedTuple):
    """teraflops: peak. gigabytes: of its memory."""

    name: str
    teraflops: float
    gigabytes: int


GPUS = (
    Gpu("B200", 2250, 180),
    Gpu("MI300X", 1307, 192),
    Gpu("H200", 989, 141),
    Gpu("H100 SXM", 989, 80),
    Gpu("L40S", 362, 48),
    Gpu("A100 80 GB", 312, 80),
    Gpu("RTX 4090", 165, 24),
    Gpu("A10", 125, 24),
    Gpu("L4", 121, 24),
)


def gpu_estimates(config: Any, sampled: SampledSteps) -> tuple[GpuEstimate, ...]:
    """An estimate for each of `GPUS`, the fastest first.

    config: of the model. UserError if it does not say its dimensions.
    """
    ordinary = unique = 0.0
    for step in sampled.steps:
        for plan, num_labels, counts in zip(step.plans, step.num_labels, step.radix, strict=True):
            ordinary += ordinary_flops(config, plan, num_labels).total
            unique += unique_flops(config, plan, round(counts.predictions)).total
    epoch = PASSES * sampled.scale
    return tuple(
        GpuEstimate(
            name=gpu.name,
            teraflops=gpu.teraflops,
            ideal_speedup=ordinary / unique,
            seconds_per_epoch=epoch * unique / (1e12 * gpu.teraflops),
            ordinary_seconds_per_epoch=epoch * ordinary / (1e12 * gpu.teraflops),
            memory_bytes=gpu.gigabytes * 10**9,
        )
        for gpu in GPUS
    )
