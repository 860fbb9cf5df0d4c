"""Numbers on and beyond the border of what a key takes: one line that names the key.

Every number key of `fit` is tried with every value where it is checked; `test_refusals.py` tries some of them, and
those of the trainer, on the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from loops import loop_on

from radixtrain.__main__ import main
from radixtrain.commands import trainer_settings
from radixtrain.commands.keys import keys_of
from radixtrain.commands.reading import read
from radixtrain.commands.trainer_settings import check_interval
from radixtrain.distributed import Ranks
from radixtrain.errors import UserError
from radixtrain.settings.commands import AnswerSettings, Run
from radixtrain.settings.data import DataSettings
from radixtrain.settings.model import ModelSettings
from radixtrain.settings.section import value_of

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
    "data.pad_to_multiple_of": lambda x: 1 <= x <= 16384,
    "data.dataset_num_proc": lambda x: 1 <= x <= 1024,
    "data.dataloader_num_workers": lambda x: 0 <= x <= 1024,
}
SECTIONS: dict[str, Callable[..., Any]] = {
    "model": lambda **given: ModelSettings("unread", **given),
    "data": DataSettings,
    "evaluate_generation": AnswerSettings,
    "": lambda **given: Run(model=ModelSettings("unread"), **given),
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


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("trainer.check_val_every_n_epoch", [None, 1]),
        ("trainer.val_check_interval", ["00:00:30:00", 1, 0.5]),
        ("trainer.devices", ["auto", 1000, [0, 1]]),
        ("trainer.max_time", [None, {"hours": 1}, "00:01:00:00"]),
        ("trainer.precision", [None, 64, "bf16-mixed"]),
        ("data.max_length", [None]),
        ("data.train_file", [None, "a.jsonl", ["a.jsonl", {"path": "b.jsonl", "weight": 2}]]),
        ("evaluate_generation.generation_kwargs", [{"stop_strings": ["###", "5"]}]),
    ],
)
def test_values_of_other_kinds_that_are_taken(key: str, values: list[Any]) -> None:
    for value in values:
        settings = read("fit", [("model.model_name_or_path", "x"), (key, value)], {})
        assert value_of(settings, key) == value


def test_adapters_with_the_learning_rate_of_all_weights(
    arguments: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    none = {"model__use_peft": True, "data__train_file": "none.jsonl"}
    for rate, told in ((None, True), (1e-4, False)):
        caplog.clear()
        assert main(arguments(model__learning_rate=rate, **none)) == 1
        assert ("model.learning_rate is 2e-05, as for training all weights; LoRA usually needs" in caplog.text) == told


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        ({"val_check_interval": 5}, True),
        ({"val_check_interval": 6}, False),
        ({"val_check_interval": 5, "limit_train_batches": 4}, False),
        ({"val_check_interval": 3, "limit_train_batches": 0.5}, False),
        ({"val_check_interval": 1.0}, True),
        ({"val_check_interval": 60, "check_val_every_n_epoch": None}, True),
    ],
)
def test_an_interval_longer_than_an_epoch(settings: dict[str, Any], is_taken: bool) -> None:
    trainer = loop_on(**settings)
    if is_taken:
        return check_interval(trainer, steps_per_epoch=5)
    with pytest.raises(UserError, match=r"trainer\.val_check_interval \d: an epoch has \d steps; set a smaller one"):
        check_interval(trainer, steps_per_epoch=5)


def test_an_interval_of_time_is_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would ask its own clock."""
    by_time, by_steps = (loop_on(val_check_interval=each) for each in ("00:00:10:00", 4))
    check_interval(by_time, steps_per_epoch=5)
    monkeypatch.setattr(trainer_settings, "ranks", lambda: Ranks(rank=0, size=2))
    check_interval(by_steps, steps_per_epoch=5)
    with pytest.raises(UserError, match=r"trainer\.val_check_interval: a time works on one device only"):
        check_interval(by_time, steps_per_epoch=5)
