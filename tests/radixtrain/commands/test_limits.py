"""Numbers on and beyond the border of what a key takes: one line that names the key, and never a traceback.

Every number key of `fit` is tried with every value where it is checked, in milliseconds; some are tried on the command
line, as far as their refusal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from jsonargparse import Namespace

from radixtrain.__main__ import main
from radixtrain.commands import limits
from radixtrain.commands.keys import keys_of
from radixtrain.commands.limits import check_interval, check_limits
from radixtrain.commands.trainer_settings import check_seed
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import Ranks
from radixtrain.errors import UserError
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from radixtrain.training.module import RadixModule

INTEGERS = [-1, 0, 1, 2**31, 2**63, 10**40]
NUMBERS = [*INTEGERS, 0.5, 1e30, math.inf, -math.inf, math.nan]
# Values that a run can use. The others are refused by a line that begins with the key.
TAKEN: dict[str, Callable[[Any], bool]] = {
    "save_every_steps": lambda x: x >= 1,
    "save_every_minutes": lambda x: 0 < x < math.inf,
    "save_total_limit": lambda x: x >= 1,
    "early_stopping": lambda x: x >= 1,
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
    "model.lora_r": lambda x: 1 <= x <= 65536,
    "model.lora_alpha": lambda x: 1 <= x < 2**31,
    "model.lora_dropout": lambda x: 0 <= x < 1,
    "data.val_size": lambda x: 0 <= x < math.inf,
    "data.batch_size": lambda x: 1 <= x <= 2**24,
    "data.max_tokens": lambda x: 4096 <= x < 2**31,
    "data.max_length": lambda x: 2 <= x <= 16384,
    "data.group_by_prefix": lambda x: 1 <= x <= 32,
    "data.min_shared_tokens": lambda x: 1 <= x < 2**31,
    "data.pad_to_multiple_of": lambda x: 1 <= x <= 16384,
    "data.dataset_num_proc": lambda x: 1 <= x <= 1024,
    "data.dataloader_num_workers": lambda x: 0 <= x <= 1024,
}
SECTIONS: dict[str, Callable[..., Any]] = {
    "model": lambda **given: RadixModule("unread", **given),
    "data": SFTData,
    "evaluate_generation": lambda **given: EvaluateGeneration(**{"do_sample": True, **given}),
}


def refused(key: str, value: Any) -> str | None:
    """The message; None if the value is taken."""
    section, _, name = key.rpartition(".")
    try:
        if section:
            SECTIONS[section](**{name: value})
        elif key == "seed_everything":
            check_seed(value)
        else:
            check_limits(Namespace(**{key: value}))
    except UserError as error:
        return str(error)
    return None


def number_keys() -> dict[str, list[Any]]:
    kinds = {key.name: key.kind for key in keys_of("fit") if "integer" in key.kind or "number" in key.kind}
    return {name: NUMBERS if "number" in kind else INTEGERS for name, kind in kinds.items()}


def test_every_number_key_is_here() -> None:
    assert number_keys().keys() == TAKEN.keys()


@pytest.mark.parametrize("key", TAKEN)
def test_every_value_of_a_key(key: str) -> None:
    for value in number_keys()[key]:
        message = refused(key, value)
        assert (message is None) == TAKEN[key](value), f"{value}: {message}"
        assert message is None or key in message, message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.check_val_every_n_epoch", 0, "trainer.check_val_every_n_epoch must be at least 1, or null; got 0"),
        ("trainer.check_val_every_n_epoch", None, None),
        ("model.warmup_steps", None, "model.warmup_steps: expected number, got null; without the key it is 0.0"),
        ("data.shuffle_dataset", None, "data.shuffle_dataset: expected true, false, got null"),
        ("trainer.max_steps", None, "trainer.max_steps: expected integer, got null"),
        ("data.max_length", None, None),
        ("data.train_file", None, None),
        ("trainer.precision", None, None),
        ("trainer.val_check_interval", 0, "trainer.val_check_interval must be above 0, or null; got 0"),
        ("trainer.val_check_interval", 0.0, "trainer.val_check_interval must be above 0, or null; got 0.0"),
        ("trainer.val_check_interval", "00:00:30:00", None),
        ("trainer.log_every_n_steps", -1, "trainer.log_every_n_steps must be at least 0, or null; got -1"),
        (
            "trainer.reload_dataloaders_every_n_epochs",
            -1,
            "trainer.reload_dataloaders_every_n_epochs must be at least 0",
        ),
        ("trainer.devices", 2**63, "trainer.devices 9,223,372,036,854,775,808: at most 1,000 on a machine"),
        ("trainer.devices", "2147483648", "trainer.devices 2,147,483,648: at most 1,000 on a machine"),
        ("trainer.devices", "auto", None),
        ("trainer.max_time", "99999999999:00:00:00", "trainer.max_time must be DD:HH:MM:SS"),
        ("trainer.max_time", "soon", "trainer.max_time must be DD:HH:MM:SS"),
        ("trainer.max_time", {"fortnights": 1}, "trainer.max_time must be DD:HH:MM:SS"),
        ("trainer.max_time", {"hours": 1}, None),
    ],
)
def test_other_values(key: str, value: Any, message: str | None) -> None:
    config = Namespace()
    config[key] = value
    if message is None:
        return check_limits(config)
    with pytest.raises(UserError) as caught:
        check_limits(config)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        ({"val_check_interval": 5}, True),
        ({"val_check_interval": 6}, False),
        ({"val_check_interval": 5, "limit_train_batches": 4}, False),
        ({"val_check_interval": 3, "limit_train_batches": 0.5}, False),
        ({"val_check_interval": 1.0}, True),
        ({}, True),
        ({"val_check_interval": 60, "check_val_every_n_epoch": None}, True),
    ],
)
def test_an_interval_longer_than_an_epoch(settings: dict[str, Any], is_taken: bool) -> None:
    trainer = SimpleNamespace(**{"limit_train_batches": 1.0, "check_val_every_n_epoch": 1, **settings})
    if is_taken:
        return check_interval(trainer, steps_per_epoch=5)
    with pytest.raises(UserError, match=r"trainer\.val_check_interval \d: an epoch has \d steps; set a smaller one"):
        check_interval(trainer, steps_per_epoch=5)


def test_an_interval_of_time_is_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would ask its own clock."""
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    by_time, by_steps = (L.Trainer(**settings, val_check_interval=each) for each in ("00:00:10:00", 4))
    check_interval(by_time, steps_per_epoch=5)
    monkeypatch.setattr(limits, "ranks", lambda: Ranks(rank=0, size=2))
    check_interval(by_steps, steps_per_epoch=5)
    with pytest.raises(UserError, match=r"trainer\.val_check_interval: a time works on one device only"):
        check_interval(by_time, steps_per_epoch=5)


MONITOR = json.dumps([{"class_path": "EarlyStopping", "init_args": {"monitor": "eval_los"}}])
USAGE = [  # refused by the type of the key: exit code 2
    ("save_every_steps", "0.5", "save_every_steps must be an integer or null; got 0.5"),
    ("model.lora_r", "true", "model.lora_r must be an integer; got True"),
    ("data.batch_size", "1e30", "data.batch_size must be an integer; got 1e+30"),
    ("data.batch_size", '""', "data.batch_size must be an integer; got an empty text"),
    ("model.learning_rate", "fast", "model.learning_rate must be a number; got fast"),
    ("model.on_nonfinite", "maybe", "model.on_nonfinite must be one of raise, skip; got maybe"),
    ("trainer.precision", "nonsense", "trainer.precision must be one of "),
]
REFUSED = [  # refused by its value: exit code 1
    ("save_total_limit", "0", "save_total_limit must be at least 1"),
    ("save_every_minutes", ".nan", "save_every_minutes must be above 0"),
    ("seed_everything", "-1", "seed_everything must be from 0"),
    ("model.adam_beta2", "1.0", "model.adam_beta2 must be at least 0 and below 1, got 1.0"),
    ("model.learning_rate", ".inf", "model.learning_rate must be a finite number, got inf"),
    ("model.max_skipped_steps", "-1", "model.max_skipped_steps must be at least 0, got -1"),
    ("data.pad_to_multiple_of", "0", "data.pad_to_multiple_of must be at least 1, got 0"),
    ("data.pad_to_multiple_of", "100000", "data.pad_to_multiple_of 100000 exceeds data.max_tokens 4096"),
    ("data.dataloader_num_workers", "2147483648", "data.dataloader_num_workers must be at most 1024"),
    ("data.val_size", ".nan", "data.val_size must be a share below 1"),
    ("save_best", "eval_los", "save_best: no metric 'eval_los', did you mean eval_loss?"),
    ("trainer.callbacks", MONITOR, "trainer.callbacks: EarlyStopping: monitor: no metric 'eval_los', did you mean"),
    ("trainer.max_epochs", "-5", "trainer: "),
    ("trainer.limit_train_batches", "1.5", "trainer: "),
    ("trainer.val_check_interval", "0", "trainer.val_check_interval must be above 0"),
    ("trainer.devices", "nonsense", "trainer: "),
    ("trainer.max_time", "nonsense", "trainer.max_time must be DD:HH:MM:SS"),
    ("ckpt_path", "best", "ckpt_path"),
    ("ckpt_path", "last", "ckpt_path"),
    ("ckpt_path", "", "ckpt_path"),
    ("ckpt_path", "FILE", "ckpt_path"),
    ("ckpt_path", "FOLDER", "ckpt_path"),
]


@pytest.mark.parametrize(
    ("key", "value", "message", "code"),
    [*((*case, 2) for case in USAGE), *((*case, 1) for case in REFUSED)],
    ids=[f"{key}={value[:12]}" for key, value, _ in (*USAGE, *REFUSED)],
)
def test_on_the_command_line(
    arguments: Any, shop: Path, capsys: Any, key: str, value: str, message: str, code: int
) -> None:
    paths = {"FILE": shop / "train.jsonl", "FOLDER": shop}
    flags = {"data__validation_file": shop / "validation.jsonl", key.replace(".", "__"): paths.get(value, value)}
    assert main(arguments(**flags)) == code
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and said[0].startswith(f"error: {message}"), said
