"""Resumes a run at its position with the current settings: each that changed is applied, or refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from radixtrain.checkpoints.folder import read_settings
from radixtrain.errors import UserError
from radixtrain.training.optimizer import set_hyperparameters

logger = logging.getLogger(__name__)

# Keys that change what the model computes.
PARTS_OF_THE_MODEL = (
    *("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "use_dora", "use_rslora"),
    *("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
)
# Keys of `data` that decide how steps are drawn: a position among other steps would mean nothing.
DRAWING = ("batch_size", "shuffle_dataset", "group_by_prefix", "seed", "val_size")
# Keys of `data` that decide the rows and their labels.
OF_ROWS = (
    *("train_file", "columns", "max_length", "excess_length_strategy", "on_bad_row", "assistant_only_loss"),
    *("completion_only_loss", "split_turns", "train_on", "chat_template_path", "chat_template_kwargs", "system_prompt"),
    *("on_unrendered", "template_date"),
)


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps.

    num_batches: DataLoader items that were trained on, over all epochs.
    num_steps: optimizer steps among them; a step that was skipped is an item without one.
    validation_pending: whether a validation was due here and has not been finished.
    """

    num_batches: int
    num_steps: int
    validation_pending: bool = False

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_batches) < 0:
            raise UserError(f"ckpt_path: {self.num_steps} steps after {self.num_batches} batches, as no run has taken")


def template_date(checkpoint: str | None) -> str:
    """Return the date that the chat template of a run sees: that of its start, today if it starts now.

    checkpoint: from which the run resumes, or None.
    """
    today = date.today().isoformat()
    saved = {} if checkpoint is None else read_settings(Path(checkpoint))["datamodule_hyper_parameters"]
    return saved.get("template_date") or today


def check_settings_of_run(checkpoint: Path, module: Any, data: Any) -> None:
    """Raise UserError, before rows are read, if a setting prevents the resume.

    checkpoint: of the run. module, data: a `RadixModule` and an `SFTData` with the current settings.
    """
    saved = read_settings(checkpoint)
    was, now = (_drawing(each) for each in (saved["datamodule_hyper_parameters"], data.hparams))
    if changed := parts_of_the_model(saved["hyper_parameters"], module.hparams):
        raise UserError(f"ckpt_path: {', '.join(changed)}, which would change the model; use the value of the run")
    _check_optimizer(saved["hyper_parameters"], module.hparams)
    if changed := [f"data.{change}".replace("data.seed", "seed_everything") for _, change in _changes(was, now)]:
        raise UserError(f"ckpt_path: {', '.join(changed)}, which would change the steps; use the value of the run")


def restore_position(checkpoint: dict[str, Any], module: Any) -> None:
    """Give the module its position and the count of skipped steps.

    Raises UserError if the optimizer or the data differ, or more steps or epochs were taken than this run has.
    """
    _check_optimizer(checkpoint["hyper_parameters"], module.hparams)
    state = checkpoint["radixtrain"]
    if not state["generators"] or not checkpoint["optimizer_states"]:
        raise UserError("ckpt_path: the checkpoint has no state of the optimizer or of random generators; name another")
    module.position = Position(**state["position"])
    module.guard.num_skipped = state["skipped"]["num_skipped"]
    length = module.steps_per_epoch
    if not length:
        return
    data = module.trainer.datamodule
    if (data_state := checkpoint.get(type(data).__qualname__)) is not None:
        try:
            data.load_state_dict(data_state)
        except UserError as error:
            raise _other_rows(error, checkpoint["datamodule_hyper_parameters"], data) from None
    check_not_beyond(module.trainer, module.position, length)


def check_not_beyond(trainer: Any, position: Position, epoch_length: int) -> None:
    """Raise UserError if more steps or epochs were taken than this run has."""
    epochs = -(-position.num_batches // epoch_length)
    for name, taken, limit in (
        ("max_steps", position.num_steps, trainer.max_steps),
        ("max_epochs", epochs, trainer.max_epochs),
    ):
        if limit not in (None, -1) and taken > limit:
            what = name.removeprefix("max_")
            raise UserError(
                f"ckpt_path: {taken:,} {what} were begun, and trainer.{name} is {limit:,}; raise it to continue"
            )


def apply_settings(module: Any, optimizer: Any, scheduler: Any) -> None:
    """Give optimizer and schedule, which are restored, the settings of this run.

    The learning rate is that of the schedule at this step, as if the run had had these settings from the beginning.
    """
    set_hyperparameters(optimizer, scheduler, module, module.hparams)
    rate = optimizer.param_groups[0]["lr"]
    logger.info("resumes after step %s, with a learning rate of %.3g", f"{module.position.num_steps:,}", rate)


def _check_optimizer(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise UserError if the checkpoint's moments are of another optimizer. Without the key it is AdamW."""
    was, now = saved.get("optimizer", "adamw"), current["optimizer"]
    if was != now:
        raise UserError(f"ckpt_path: model.optimizer was {was} and is {now}, which keeps other moments; set {was}")


def _other_rows(error: UserError, saved: Mapping[str, Any], data: Any) -> UserError:
    """Reword, in terms of the configuration, an error about rows that are not the run's."""
    if "digest" not in str(error):
        return error
    changed = [f"data.{change}" for name, change in _changes(saved, data.hparams) if name in OF_ROWS]
    what = f"{', '.join(changed)}; give the value of the run" if changed else "data.train_file holds others now"
    return UserError(f"ckpt_path: the rows and labels are not those of the run: {what}, or start in another output_dir")


def parts_of_the_model(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List `model.lora_r was 8 and is 16` for each change that makes another model, of settings of `RadixModule`."""
    return [f"model.{change}" for name, change in _changes(saved, current) if name in PARTS_OF_THE_MODEL]


def _drawing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an `SFTData` that affect draws. With a `validation_file`, `val_size` does not."""
    found = {name: settings[name] for name in DRAWING if name in settings}
    return {**found, "val_size": 0} if settings.get("validation_file") else found


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that both have, and `lora_r was 8 and is 16` for values that differ."""
    for name, now in current.items():
        if name in saved and not name.startswith("_") and _plain(saved[name]) != _plain(now):
            yield name, f"{name} was {_in_yaml(saved[name])} and is {_in_yaml(now)}"


def _in_yaml(value: object) -> Any:
    """Write a value as a configuration does: true, false and null for Python's words, anything else unchanged."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def _plain(value: object) -> Any:
    """Return the value with lists for tuples, as JSON would give it back."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
