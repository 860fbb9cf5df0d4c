"""What a checkpoint keeps besides weights and optimizer, and what a run that goes on takes from it.

A setting that is not what it was is applied, and said, or refused. None is ignored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from radixtrain import __version__
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.redaction import masked
from radixtrain.training.optimizer import epoch_length, num_steps_of_run, set_hyperparameters
from radixtrain.training.survival.position import Position, generator_states
from radixtrain.tree.cost_model import Rates

__all__ = ["add_run_state", "apply_settings", "check_same_model", "restored_rates", "without_timer"]

logger = logging.getLogger(__name__)

SETTINGS = ("hyper_parameters", "datamodule_hyper_parameters")  # of Lightning's checkpoints
# Keys that are part of what the model computes: going on with another value would be another model.
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


def add_run_state(checkpoint: dict[str, Any], module: Any, in_step: Mapping[str, Any] | None) -> None:
    """Add `radixtrain` to a checkpoint that Lightning has made of a `RadixModule`.

    in_step: states of the random generators before the step that is being computed; None between two steps.

    Of a model whose weights are partly frozen only the trained ones are kept, and a digest of the others.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    frozen = _frozen(module)
    is_partial = bool(frozen and trained)
    if is_partial:
        checkpoint["state_dict"] = {name: each for name, each in checkpoint["state_dict"].items() if name in trained}
        module.base_digest = module.base_digest or _digest(frozen)
    checkpoint["radixtrain"] = {
        "position": module.position.as_dict(),
        "generators": in_step or generator_states(),
        "skipped": module.guard.state_dict(),
        "partial": is_partial,
        "base": module.base_digest,
        "config": _config_of(module.model),
        "epoch_length": epoch_length(module.trainer, module.steps_per_epoch),
        "num_steps": num_steps_of_run(module.trainer, module.steps_per_epoch) if module.steps_per_epoch else None,
        "precision": str(module.trainer.precision),
        "job": os.environ.get("SLURM_JOB_ID"),
        "version": __version__,
    }
    for name in SETTINGS:
        if name in checkpoint:
            checkpoint[name] = masked(dict(checkpoint[name]))
    checkpoint["radixtrain_rates"] = None if module.rates is None else asdict(module.rates)


def check_same_model(checkpoint: Mapping[str, Any], module: Any) -> None:
    """UserError if the checkpoint is of another model: other adapters, configuration or frozen weights."""
    state = checkpoint.get("radixtrain", {})
    saved = checkpoint.get("hyper_parameters", {})
    changed = [f"model.{name} was {was} and is {now}" for name, was, now in _changes(saved, module.hparams)
               if name in PARTS_OF_THE_MODEL]  # fmt: skip
    if changed:
        raise UserError(f"ckpt_path: {', '.join(changed)}, which would be another model; give the value of the run")
    if state.get("config") and (differs := _first_difference(state["config"], _config_of(module.model))):
        raise UserError(f"ckpt_path: the checkpoint is of a model with another configuration: {differs}")
    if state.get("base"):
        module.base_digest = _digest(_frozen(module))
        if module.base_digest != state["base"]:
            raise UserError(
                f"ckpt_path: the checkpoint holds only what was trained, and the weights beside it in "
                f"{module.hparams.model_name_or_path} are not those of the run; give the model that it started from"
            )


def apply_settings(checkpoint: Mapping[str, Any], module: Any) -> None:
    """Give optimizer and schedule the settings of this run, and say which are not those of the checkpoint.

    Called when Lightning has restored both. The learning rate is that of the schedule at this step, as if the run had
    had these settings from the beginning. UserError if an epoch has another number of steps than before.
    """
    trainer = module.trainer
    _check_epoch_length(checkpoint, module)
    num_steps = num_steps_of_run(trainer, module.steps_per_epoch)
    optimizer, scheduler = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    set_hyperparameters(optimizer, scheduler, module, module.hparams)
    state, step = checkpoint.get("radixtrain", {}), Position.of(checkpoint).num_steps
    changed = [
        *_told("model", checkpoint.get("hyper_parameters", {}), module.hparams),
        *_told("data", checkpoint.get("datamodule_hyper_parameters", {}), getattr(trainer.datamodule, "hparams", {})),
    ]
    if state.get("precision", str(trainer.precision)) != str(trainer.precision):
        changed.append(f"trainer.precision was {state['precision']} and is {trainer.precision}")
    if state.get("num_steps") not in (None, num_steps):
        changed.append(f"the run had {_number(state['num_steps'])} steps and has {_number(num_steps)}")
    rate = optimizer.param_groups[0]["lr"]
    logger.info("goes on after step %s, with a learning rate of %.3g", f"{step:,}", rate)
    if changed:
        logger.warning("from step %s on other settings: %s", f"{step:,}", "; ".join(changed))


def restored_rates(checkpoint: Mapping[str, Any]) -> Rates | None:
    """The calibration that the run chose by."""
    rates = checkpoint.get("radixtrain_rates")
    return None if rates is None else Rates.from_dict(rates)


def without_timer(checkpoint: dict[str, Any]) -> None:
    """Forget the time that the run had taken: `trainer.max_time` is that of each start."""
    callbacks = checkpoint.get("callbacks", {})
    for name in [name for name in callbacks if name.startswith("Timer")]:
        del callbacks[name]


def _check_epoch_length(checkpoint: Mapping[str, Any], module: Any) -> None:
    was = checkpoint.get("radixtrain", {}).get("epoch_length")
    length = epoch_length(module.trainer, module.steps_per_epoch)
    if was and length and length != was:
        raise UserError(
            f"ckpt_path: an epoch of the run had {was:,} steps and has {length:,} here; set "
            f"trainer.limit_train_batches and trainer.overfit_batches as they were"
        )


def _told(section: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name, was, now in _changes(saved, here):
        if name not in WITHOUT_EFFECT:
            yield f"{section}.{name} was {was} and is {now}"


def _changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys that both have, with values that differ. Lists and tuples are the same."""
    for name, now in here.items():
        if name in saved and not name.startswith("_") and _plain(saved[name]) != _plain(masked(now, name)):
            yield name, saved[name], now


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _frozen(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def _digest(tensors: Iterable[Tensor]) -> str:
    """Of their bytes, one tensor after the other."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _config_of(model: nn.Module) -> dict[str, Any]:
    """What the configuration says of the computation, without names of folders and versions."""
    config = pretrained_model_of(model).config.to_dict()
    left_out = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
    return {name: _json(value) for name, value in config.items() if name not in left_out and not name.startswith("_")}


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Keys that only one of them has may come with another version of transformers."""
    for name in saved:
        if name in here and _plain(saved[name]) != _plain(here[name]):
            return f"{name} was {saved[name]} and is {here[name]}"
    return ""


def _number(steps: int) -> str:
    return f"{steps:,}" if steps >= 0 else "endless"
