"""AdamW, and its learning rate over the steps of a whole run."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from transformers import get_scheduler

from radixtrain.errors import UserError

LARGEST = 1e38  # below the largest float32, which torch converts these numbers to
# No layer has more than 65,536 inputs, and an adapter of a higher rank is larger than the layer.
LIMITS = {
    **dict.fromkeys(("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "adam_epsilon"), (0, LARGEST)),
    **{"max_skipped_steps": (0, 2**31 - 1), "lora_r": (1, 2**16), "lora_alpha": (1, 2**31 - 1)},
}


def check_settings(settings: Any) -> None:
    """UserError for numbers that AdamW, the schedule and adapters cannot take. settings: of a `RadixModule`."""
    for name, (least, most) in LIMITS.items():
        if not least <= settings[name] <= most:  # nor is NaN
            raise UserError(f"model.{name} must be from {least:,} to {most:,}, got {settings[name]}")
    for name in ("adam_beta1", "adam_beta2", "lora_dropout"):
        if not 0 <= settings[name] < 1:
            raise UserError(f"model.{name} must be at least 0 and below 1, got {settings[name]}")
    step_size = settings.learning_rate / (1 - settings.adam_beta1)  # of AdamW's first step
    if step_size > LARGEST:
        raise UserError(f"model.learning_rate {settings.learning_rate} is too large: AdamW computes with float32")


def adamw(module: nn.Module, settings: Any) -> torch.optim.AdamW:
    """AdamW over what is trained. settings: of a `RadixModule`."""
    return torch.optim.AdamW(
        _parameter_groups(module, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
    )


def schedule(optimizer: torch.optim.Optimizer, settings: Any, num_steps: int) -> Any:
    """Warm-up, and after it what `lr_scheduler_type` says. settings: of a `RadixModule`."""
    warmup = settings.warmup_steps
    num_warmup = round(warmup * num_steps) if warmup < 1 else int(warmup)
    return get_scheduler(settings.lr_scheduler_type, optimizer, num_warmup, num_steps)


def set_hyperparameters(optimizer: torch.optim.Optimizer, scheduler: Any, module: nn.Module, settings: Any) -> None:
    """Give a restored optimizer and its schedule the settings of this run; the moments and the step stay.

    scheduler: as `schedule` makes it, with the number of its step restored. settings: of a `RadixModule`.
    """
    base = settings.learning_rate
    betas = (settings.adam_beta1, settings.adam_beta2)
    scheduler.base_lrs = [base] * len(scheduler.base_lrs)
    groups = zip(optimizer.param_groups, _parameter_groups(module, settings.weight_decay), strict=True)
    for (group, fresh), factor in zip(groups, scheduler.lr_lambdas, strict=True):
        group.update(betas=betas, eps=settings.adam_epsilon, weight_decay=fresh["weight_decay"], initial_lr=base)
        group["lr"] = base * factor(scheduler.last_epoch)


def epoch_length(trainer: L.Trainer, steps_per_epoch: int | None) -> int | None:
    """Steps that a run takes in an epoch, with `trainer.limit_train_batches` and `overfit_batches`. None if unknown."""
    if steps_per_epoch is None:
        return None
    limit = trainer.limit_train_batches
    return min(steps_per_epoch, limit) if isinstance(limit, int) else int(steps_per_epoch * limit)


def num_steps_of_run(trainer: L.Trainer, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the whole run; -1 if it has no end.

    steps_per_epoch: None if nobody knows. Then `trainer.estimated_stepping_batches` counts: it sets up the loader
        before a checkpoint is restored, after which Lightning (2.6.6) does not give the loader its state back, and a
        resumed run repeats data.
    """
    per_epoch = epoch_length(trainer, steps_per_epoch)
    if per_epoch is None:
        return int(trainer.estimated_stepping_batches)
    if trainer.max_epochs in (None, -1):
        return trainer.max_steps
    num_steps = per_epoch * int(trainer.max_epochs or 0)
    return num_steps if trainer.max_steps == -1 else min(num_steps, trainer.max_steps)


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
