"""The optimizer by its name, and its learning rate over the steps of a whole run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import get_scheduler

from radixtrain.checkpoints.tensors import is_sharded
from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import model_inside
from radixtrain.versions import to_install

if TYPE_CHECKING:
    from radixtrain.settings.sections import ModelSettings


SMALLEST_8BIT = 4096  # bitsandbytes keeps the moments of smaller weights in 32 bits
# The scale of Moonlight (arXiv 2502.16982, section 2.2): updates as large as AdamW's, so one learning rate fits both.
MUON = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
WHOLE_MATRICES = "needs whole matrices, and trainer.strategy fsdp2 divides them by rows; use ddp, or adamw"


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers and AdamW for the rest: one list of groups, one state, one step.

    A checkpoint, the schedule and Lightning's count of steps see a single optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float):
        """Take groups of both; those with a `momentum` are Muon's."""
        self.kinds = [torch.optim.Muon if "momentum" in group else torch.optim.AdamW for group in groups]
        self.parts = [kind([group], lr=lr) for kind, group in zip(self.kinds, groups, strict=True)]
        super().__init__([part.param_groups[0] for part in self.parts], {})
        self._share_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. closure: computes the loss, which is returned, and the gradients. Lightning always gives one."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def _share_state(self) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.__setstate__({"state": self.state, "param_groups": [group]})


def optimizer_of(module: nn.Module, settings: ModelSettings) -> torch.optim.Optimizer:
    """Make the optimizer of `model.optimizer` over the trained weights. settings: of a `RadixModule`.

    Raises UserError if it does not work with the installed package, the device, dtype or strategy.
    """
    groups, name = _parameter_groups(module, settings), settings.optimizer
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate)
    weights = [weight for group in groups for weight in group["params"]]
    if any(is_sharded(weight) for weight in weights):
        raise UserError(f"model.optimizer {name} {WHOLE_MATRICES}")
    if name == "muon":
        return MuonWithAdamW(groups, settings.learning_rate)
    check_package(name)
    if any(weight.dtype == torch.float64 for weight in weights):
        raise UserError(f"model.optimizer {name} computes in float32; set model.dtype to float32 or bfloat16, or adamw")
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    for device in {weight.device for weight in weights if not weight.is_meta}:
        _try_step(AdamW8bit, device)
    optimizer = AdamW8bit(groups, lr=settings.learning_rate, min_8bit_size=SMALLEST_8BIT)
    optimizer.mng = object.__new__(GlobalOptimManager)  # not the global one, which keeps weights by id() forever
    optimizer.mng.initialize()
    optimizer.mng.override_config(list(_embeddings(module)), "optim_bits", 32)
    return optimizer


def check_package(name: str) -> None:
    """Raise UserError if the package of an optimizer is missing."""
    if name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise UserError(f"model.optimizer {name} needs the package bitsandbytes: {to_install('bitsandbytes')}")


def _try_step(kind: type, device: torch.device) -> None:
    """Raise UserError if this release of bitsandbytes has no 8-bit step on the device."""
    weight = nn.Parameter(torch.ones(SMALLEST_8BIT, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        kind([weight]).step()
    except Exception as error:
        import bitsandbytes

        release = f"bitsandbytes {bitsandbytes.__version__}"
        raise UserError(
            f"model.optimizer: {release} has no 8-bit AdamW on {device.type}: {first_line(error)}; set adamw"
        ) from error


def moment_bytes(module: nn.Module, settings: ModelSettings) -> int:
    """Count the bytes that the optimizer keeps for trained weights. Arguments as for `optimizer_of`."""
    in_32_bits = _embeddings(module) if settings.optimizer == "adamw_8bit" else set()

    def of(weight: nn.Parameter, group: dict[str, Any]) -> int:
        if settings.optimizer != "adamw_8bit":
            return weight.nbytes * (1 if "momentum" in group else 2)
        is_8bit = weight.numel() >= SMALLEST_8BIT and weight not in in_32_bits
        return weight.numel() * (2 if is_8bit else 8)

    return sum(of(weight, group) for group in _parameter_groups(module, settings) for weight in group["params"])


def schedule(optimizer: torch.optim.Optimizer, settings: ModelSettings, num_steps: int) -> Any:
    """Make the schedule: warm-up, and after it what `lr_scheduler_type` says. settings: of a `RadixModule`."""
    warmup = settings.warmup_steps
    num_warmup = round(warmup * num_steps) if warmup < 1 else int(warmup)
    return get_scheduler(settings.lr_scheduler_type, optimizer, num_warmup, num_steps)


def set_hyperparameters(
    optimizer: torch.optim.Optimizer, scheduler: Any, module: nn.Module, settings: ModelSettings
) -> None:
    """Give a restored optimizer and its schedule the settings of this run; the moments and the step stay.

    scheduler: as `schedule` makes it, with the number of its step restored. settings: of a `RadixModule`.
    """
    base = settings.learning_rate
    scheduler.base_lrs = [base] * len(scheduler.base_lrs)
    groups = zip(optimizer.param_groups, _parameter_groups(module, settings), strict=True)
    for (group, fresh), factor in zip(groups, scheduler.lr_lambdas, strict=True):
        group.update({**fresh, "params": group["params"], "initial_lr": base})
        group["lr"] = base * factor(scheduler.last_epoch)


def num_steps_of_run(trainer: Any, steps_per_epoch: int | None) -> int:
    """Count the optimizer steps of the whole run; -1 if it has no end.

    steps_per_epoch: None if unknown. Then `trainer.estimated_stepping_batches` counts: it sets up the loader
        before a checkpoint is restored, after which Lightning (2.6.6) does not give the loader its state back, and a
        resumed run repeats data.
    """
    if steps_per_epoch is None:
        return int(trainer.estimated_stepping_batches)
    if trainer.max_epochs in (None, -1):
        return trainer.max_steps
    num_steps = steps_per_epoch * int(trainer.max_epochs or 0)
    return num_steps if trainer.max_steps == -1 else min(num_steps, trainer.max_steps)


def _parameter_groups(module: nn.Module, settings: ModelSettings) -> list[dict[str, Any]]:
    """Group weights with their settings, except the learning rate. Groups with a `momentum` are Muon's."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hidden = _hidden_matrices(module) if settings.optimizer == "muon" else set()
    adam = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon}
    decay = {"weight_decay": settings.weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p in hidden], **decay, **MUON},
        {"params": [p for p in trained if p.ndim >= 2 and p not in hidden], **decay, **adam},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, **adam},
    ]
    return [group for group in groups if group["params"]]


def _hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the 2-D weights outside of embeddings and head."""
    head = model_inside(module).get_output_embeddings()
    outside = _embeddings(module) | (set() if head is None else set(head.parameters()))
    return {parameter for parameter in module.parameters() if parameter.ndim == 2} - outside


def _embeddings(module: nn.Module) -> set[nn.Parameter]:
    """Find the embeddings of tokens, adapters included, and of any other kind."""
    layers = [model_inside(module).get_input_embeddings(), *module.modules()]
    found = [layer for index, layer in enumerate(layers) if index == 0 or isinstance(layer, nn.Embedding)]
    return {parameter for layer in found for parameter in layer.parameters()}
