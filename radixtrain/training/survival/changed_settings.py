"""Settings of a run that are not those of the checkpoint that it goes on from, and what follows from each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from radixtrain.redaction import masked

__all__ = ["parts_of_the_model", "plain", "settings_of_run", "with_effect"]

# Keys that are part of what the model computes.
PARTS_OF_THE_MODEL = (
    *("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "use_dora", "use_rslora"),
    *("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
)
# Keys that no step of training reads, or that are compared by what they lead to: weights, rows, steps.
WITHOUT_EFFECT = (
    *("model_name_or_path", "scores", "next_tokens", "normalize_embeddings", "generate", "verify_first_batch"),
    *("train_file", "validation_file", "test_file", "predict_file", "columns", "predict_unlabelled", "predict_prompts"),
    *("dataset_num_proc", "cache_dir", "overwrite_cache", "dataloader_num_workers", "on_bad_row"),
    *("batch_size", "seed", "shuffle_dataset", "group_by_prefix"),  # refused by the data if they differ
)

# What a run does besides its steps: keys of the top level, and those of `trainer` that say when it validates.
BESIDE_STEPS = (
    *("save_best", "early_stopping", "save_every_steps", "save_every_minutes", "save_total_limit"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.limit_val_batches"),
)


def settings_of_run(settings: Any) -> dict[str, Any]:
    """Keys that are neither the model's nor the data's, with their values, as a checkpoint keeps them.

    settings: of `fit`, as they were parsed; no part of `evaluate_generation` is an instance yet.
    """
    answers = {f"evaluate_generation.{name}": value for name, value in vars(settings.evaluate_generation).items()}
    found = {**{name: settings[name] for name in BESIDE_STEPS}, **answers}
    return {name: plain(masked(value, name)) for name, value in found.items()}


def parts_of_the_model(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """`model.lora_r was 8 and is 16` for each change that makes another model. Both: settings of a `RadixModule`."""
    changes = ((name, was, now) for name, was, now in _changes(saved, here) if name in PARTS_OF_THE_MODEL)
    return [f"model.{name} was {in_yaml(was)} and is {in_yaml(now)}" for name, was, now in changes]


def with_effect(section: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The same for each change that the run notices. section: model, data, or empty for `settings_of_run`."""
    changes = ((name, was, now) for name, was, now in _changes(saved, here) if name not in WITHOUT_EFFECT)
    before = f"{section}." if section else ""
    return [f"{before}{name} was {in_yaml(was)} and is {in_yaml(now)}" for name, was, now in changes]


def in_yaml(value: Any) -> Any:
    """As a configuration has it: true, false and null for Python's words, anything else as it is."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def plain(value: Any) -> Any:
    """The value with lists for tuples, as JSON would give it back."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys that both have, with values that differ; secrets are compared as `***`."""
    for name, now in here.items():
        if name in saved and not name.startswith("_") and plain(saved[name]) != plain(masked(now, name)):
            yield name, saved[name], now
