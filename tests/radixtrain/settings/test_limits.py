"""Numbers on and beyond the border of what a key takes: one line that names the key, for every number key of `fit`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from radixtrain.commands.help import keys_of
from radixtrain.errors import UserError
from radixtrain.settings.commands import AnswerSettings, RunSettings
from radixtrain.settings.sections import DataSettings, ModelSettings

INTEGERS = [-1, 0, 1, 2**31, 2**63, 10**40]
NUMBERS = [*INTEGERS, 0.5, 1e30, math.inf, -math.inf, math.nan]
# Values that a run can use. The others are refused by a line that begins with the key.
TAKEN: dict[str, Callable[[Any], bool]] = {
    "save_every_steps": lambda x: x >= 1,
    "save_every_minutes": lambda x: 0 < x < math.inf,
    "save_total_limit": lambda x: x >= 1,
    "early_stopping": lambda x: x >= 1,
    "sp_size": lambda x: x >= 1,
    "ddp_timeout": lambda x: 1 <= x <= 2_000_000,
    "seed_everything": lambda x: 0 <= x < 2**32,
    "evaluate_generation.num_samples": lambda x: x >= 1,
    "evaluate_generation.max_new_tokens": lambda x: x >= 1,
    "evaluate_generation.temperature": lambda x: x > 0,
    "evaluate_generation.batch_size": lambda x: x >= 1,
    "model.learning_rate": lambda x: 0 <= x <= 1e37,
    "model.warmup_steps": lambda x: 0 <= x <= 1e38,
    "model.weight_decay": lambda x: 0 <= x <= 1e38,
    "model.adam_beta1": lambda x: 0 <= x < 1,
    "model.adam_beta2": lambda x: 0 <= x < 1,
    "model.adam_epsilon": lambda x: 0 <= x <= 1e38,
    "model.max_grad_norm": lambda x: 0 <= x <= 1e38,
    "model.max_skipped_steps": lambda x: 0 <= x < 2**31,
    "model.activation_checkpointing": lambda x: 0 <= x <= 1,
    "model.lora_r": lambda x: 1 <= x <= 65536,
    "model.lora_alpha": lambda x: 1 <= x < 2**31,
    "model.lora_dropout": lambda x: 0 <= x < 1,
    "data.val_size": lambda x: 0 <= x < math.inf,
    "data.batch_size": lambda x: 1 <= x <= 2**24,
    "data.max_tokens": lambda x: 1 <= x < 2**31,
    "data.max_length": lambda x: 2 <= x < 2**31,
    "data.group_by_prefix": lambda x: 1 <= x <= 32,
    "data.min_shared_tokens": lambda x: 1 <= x < 2**31,
    "data.dataset_num_proc": lambda x: 1 <= x <= 1024,
    "data.dataloader_num_workers": lambda x: 0 <= x <= 1024,
}
SECTIONS: dict[str, Callable[..., Any]] = {
    "model": lambda **given: ModelSettings("unread", **given),
    "data": DataSettings,
    "evaluate_generation": lambda **given: AnswerSettings(do_sample=True, **given),
    "": lambda **given: RunSettings(model=ModelSettings("unread"), **given),
}


def refused(key: str, value: Any) -> str | None:
    """The message; None if the value is taken."""
    section, _, name = key.rpartition(".")
    try:
        SECTIONS[section](**{name: value})
    except UserError as error:
        return str(error)
    return None


def number_keys() -> dict[str, list[Any]]:
    kinds = {key.name: key.kind for key in keys_of("fit") if "integer" in key.kind or "number" in key.kind}
    return {name: NUMBERS if "number" in kind else INTEGERS for name, kind in kinds.items()}


def test_every_value_of_every_key() -> None:
    assert number_keys().keys() == TAKEN.keys()
    for key, values in number_keys().items():
        for value in values:
            message = refused(key, value)
            assert (message is None) == TAKEN[key](value), f"{key}, {value}: {message}"
            assert message is None or key in message, message
