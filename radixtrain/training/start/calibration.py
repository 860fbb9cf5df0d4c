"""What `data.min_shared_tokens: auto` chooses by: the calibration of a run, the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from radixtrain.distributed import ranks
from radixtrain.hf.calibration import calibrate
from radixtrain.tree.cost_model import StepCost

__all__ = ["calibrated"]


def calibrated(module: Any) -> StepCost | None:
    """The cost of the model of a `RadixModule`. Unless the module has rates, rank 0 measures them for all ranks.

    None for `attention: reference` and on a device that is neither a CPU nor CUDA: then every branch is taken.
    """
    settings = module.hparams
    if module.model is None or settings.attention == "reference" or module.device.type not in ("cpu", "cuda"):
        return None
    choices: dict[str, Any] = {"attention": settings.attention, "kernel": settings.kernel}
    choices["dtype"] = torch.bfloat16 if str(module.trainer.precision).startswith("bf16") else None
    measure = not torch.are_deterministic_algorithms_enabled()  # as `trainer.deterministic: true` does
    if module.rates is None:
        module.rates = ranks().broadcast_from_rank0(lambda: calibrate(module.model, **choices, measure=measure).rates)
    return calibrate(module.model, **choices, rates=module.rates)
