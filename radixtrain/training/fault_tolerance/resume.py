"""Resume a run from a checkpoint, with the settings of now: each that changed is applied, and said, or refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from radixtrain.errors import UserError
from radixtrain.redaction import masked
from radixtrain.training.fault_tolerance.position import Position, check_not_beyond
from radixtrain.training.optimizer import epoch_length, num_steps_of_run, set_hyperparameters

__all__ = ["apply_settings", "parts_of_the_model", "restore_position", "settings_of_run"]

logger = logging.getLogger(__name__)

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
    own = {**{name: settings[name] for name in BESIDE_STEPS}, **answers}
    return {name: _plain(masked(value, name)) for name, value in own.items()}


def restore_position(checkpoint: dict[str, Any], module: Any) -> None:
    """Give the module its position and the count of skipped steps, and Lightning the state of its loops.

    Called before Lightning reads the loops and callbacks of the checkpoint, which are changed here: it forgets the time
    that the run had taken, since `trainer.max_time` is that of each start.

    Raises UserError if the data are others, an epoch has another number of steps than before, or more steps or epochs
    were taken than this run has.
    """
    state, callbacks = checkpoint["radixtrain"], checkpoint["callbacks"]
    for name in [name for name in callbacks if name.startswith("Timer")]:
        del callbacks[name]
    module.position = Position(**state["position"])
    module.guard.load_state_dict(state["skipped"])
    length, was = epoch_length(module.trainer, module.steps_per_epoch), state["epoch_length"]
    if not length:
        return
    # Lightning compares the data after the model is restored: too late, since others have epochs of another length.
    data = module.trainer.datamodule
    if (data_state := checkpoint.get(type(data).__qualname__)) is not None:
        data.load_state_dict(data_state)
    if was not in (None, length):
        raise UserError(
            f"ckpt_path: an epoch of the run had {was:,} steps and has {length:,} here; set "
            f"trainer.limit_train_batches and trainer.overfit_batches as they were"
        )
    check_not_beyond(module.trainer, module.position, length)
    checkpoint["loops"]["fit_loop"] = module.position.loops(length)


def apply_settings(checkpoint: Mapping[str, Any], module: Any) -> None:
    """Give optimizer and schedule the settings of this run, and say which are not those of the checkpoint.

    Called when Lightning has restored both. The learning rate is that of the schedule at this step, as if the run had
    had these settings from the beginning.
    """
    trainer, state, step = module.trainer, checkpoint["radixtrain"], module.position.num_steps
    optimizer, scheduler = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    set_hyperparameters(optimizer, scheduler, module, module.hparams)
    num_steps, precision = num_steps_of_run(trainer, module.steps_per_epoch), str(trainer.precision)
    changed = [
        *_with_effect("model.", checkpoint["hyper_parameters"], module.hparams),
        *_with_effect("data.", checkpoint["datamodule_hyper_parameters"], trainer.datamodule.hparams),
        *_with_effect("", state["settings"], module.run_settings),
    ]
    if state["precision"] != precision:
        changed.append(f"trainer.precision was {state['precision']} and is {precision}")
    if state["num_steps"] not in (None, num_steps):
        changed.append(f"the run had {_number(state['num_steps'])} steps and has {_number(num_steps)}")
    rate = optimizer.param_groups[0]["lr"]
    logger.info("goes on after step %s, with a learning rate of %.3g", f"{step:,}", rate)
    if changed:
        logger.warning("from step %s on other settings: %s", f"{step:,}", "; ".join(changed))


def parts_of_the_model(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """`model.lora_r was 8 and is 16` for each change that makes another model. Both: settings of a `RadixModule`."""
    return [f"model.{change}" for name, change in _changes(saved, current) if name in PARTS_OF_THE_MODEL]


def _with_effect(section: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The same for each change that the run notices. section: what keys begin with."""
    return [f"{section}{change}" for name, change in _changes(saved, current) if name not in WITHOUT_EFFECT]


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that both have, and `lora_r was 8 and is 16` for values that differ; secrets are compared as `***`."""
    for name, now in current.items():
        if name in saved and not name.startswith("_") and _plain(saved[name]) != _plain(masked(now, name)):
            yield name, f"{name} was {_in_yaml(saved[name])} and is {_in_yaml(now)}"


def _in_yaml(value: Any) -> Any:
    """As a configuration has it: true, false and null for Python's words, anything else as it is."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def _plain(value: Any) -> Any:
    """The value with lists for tuples, as JSON would give it back."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _number(steps: int) -> str:
    return f"{steps:,}" if steps >= 0 else "endless"
