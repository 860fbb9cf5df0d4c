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
TAKEN = """
save_every_steps                   [1, inf]
save_every_minutes                 (0, inf)
save_total_limit                   [1, inf]
early_stopping                     [1, inf]
sp_size                            [1, inf]
ddp_timeout                        [1, 2000000]
seed_everything                    [0, 4294967295]
evaluate_generation.num_samples    [1, inf]
evaluate_generation.max_new_tokens [1, inf]
evaluate_generation.temperature    (0, inf]
evaluate_generation.batch_size     [1, inf]
model.learning_rate                [0, 1e37]
model.warmup_steps                 [0, 1e38]
model.weight_decay                 [0, 1e38]
model.adam_beta1                   [0, 1)
model.adam_beta2                   [0, 1)
model.adam_epsilon                 [0, 1e38]
model.max_grad_norm                [0, 1e38]
model.max_skipped_steps            [0, 2147483647]
model.activation_checkpointing     [0, 1]
model.lora_r                       [1, 65536]
model.lora_alpha                   [1, 2147483647]
model.lora_dropout                 [0, 1)
data.val_size                      [0, inf)
data.batch_size                    [1, 16777216]
data.max_tokens                    [1, 2147483647]
data.max_length                    [2, 2147483647]
data.group_by_prefix               [1, 32]
data.min_shared_tokens             [1, 2147483647]
data.dataset_num_proc              [1, 1024]
data.dataloader_num_workers        [0, 1024]
"""
"""Values that a run can use. The others are refused by a line that begins with the key."""
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


def is_in(value: Any, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    return (low <= value if interval[0] == "[" else low < value) and (
        value <= high if interval[-1] == "]" else value < high
    )


def test_every_value_of_every_key() -> None:
    taken = dict(line.split(maxsplit=1) for line in TAKEN.strip().splitlines())
    assert number_keys().keys() == taken.keys()
    for key, values in number_keys().items():
        for value in values:
            message = refused(key, value)
            assert (message is None) == is_in(value, taken[key]), f"{key}, {value}: {message}"
            assert message is None or key in message, message
