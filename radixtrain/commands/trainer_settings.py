"""Lightning's settings that radixtrain fills in, and those that it refuses because they would change a step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from radixtrain.commands.limits import check_limits
from radixtrain.commands.loggers import TRACKING, check_loggers
from radixtrain.errors import UserError
from radixtrain.redaction import check_unmasked

__all__ = [
    "REFUSED_BY_LIGHTNING",
    "as_list",
    "check_seed",
    "check_settings",
    "check_trainer_settings",
    "data_seed",
]

# What Lightning raises for settings that it refuses: in turn for `devices: 0`, `strategy: nonsense`, `devices: -1` on a
# CPU, and `strategy: xla` without torch_xla. Nothing of ours runs while it makes the trainer.
REFUSED_BY_LIGHTNING = (MisconfigurationException, ValueError, TypeError, ModuleNotFoundError, OverflowError)


def check_trainer_settings(config: Any) -> None:
    """Refuse Lightning's settings that would change a step; each error names the key that does it here."""
    if config.accumulate_grad_batches != 1:
        raise UserError(
            "trainer.accumulate_grad_batches: a step is cut by data.max_tokens; set data.batch_size instead"
        )
    if config.gradient_clip_val is not None:
        raise UserError("trainer.gradient_clip_val: set model.max_grad_norm instead")
    if config.barebones:
        raise UserError("trainer.barebones: a run logs its steps and saves them; leave it out")
    if str(config.precision) in ("16", "16-mixed", "16-true"):
        raise UserError(f"trainer.precision {config.precision}: float16 needs a loss scale; use bf16-mixed or 32-true")


def check_settings(settings: Any, command: str) -> None:
    """UserError for a value that no run can use. settings: of the command, as they were parsed."""
    check_seed(settings.seed_everything)
    check_limits(settings)
    _check_weights_only(settings)
    if command in TRACKING:
        check_loggers(settings)
    check_unmasked(settings.as_dict())


def check_seed(seed: Any) -> None:
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything must be from 0 to {2**32 - 1}, got {seed}")


def _check_weights_only(config: Any) -> None:
    """Lightning's key of this name lets a checkpoint run code. config: of the command."""
    if config.get("weights_only") is False:
        raise UserError("weights_only: false would run code from a checkpoint; radixtrain always reads it as data")


def data_seed(seed: Any) -> int:
    """Of the order of the rows. `seed_everything` may be true or false."""
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 42


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []
