"""What a checkpoint keeps besides weights and optimizer, and the check that a run goes on with the same model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from radixtrain import __version__
from radixtrain.checkpoints.sharded import whole
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.redaction import masked
from radixtrain.training.optimizer import epoch_length, num_steps_of_run
from radixtrain.training.survival.changed_settings import parts_of_the_model, plain
from radixtrain.training.survival.generators import generator_states
from radixtrain.training.survival.weights import trained_names

__all__ = ["add_run_state", "check_same_model"]

SETTINGS = ("hyper_parameters", "datamodule_hyper_parameters")  # of Lightning's checkpoints


def add_run_state(checkpoint: dict[str, Any], module: Any, in_step: Mapping[str, Any] | None) -> None:
    """Add `radixtrain` to a checkpoint that Lightning has made of a `RadixModule`.

    in_step: states of this rank's random generators before the step that is being computed; None between two steps.
        Those of all ranks are kept.

    Of a model whose weights are partly frozen only the trained ones are kept, and a digest of the others.
    """
    trained, frozen = trained_names(module), _frozen(module)
    has_base = bool(frozen and trained)
    if has_base:
        checkpoint["state_dict"] = {name: each for name, each in checkpoint["state_dict"].items() if name in trained}
        module.base_digest = module.base_digest or _digest(frozen)
    checkpoint["radixtrain"] = {
        "position": module.position.as_dict(),
        "generators": ranks().gather(in_step or generator_states()),
        "skipped": module.guard.state_dict(),
        "partial": has_base,
        "base": module.base_digest,
        "config": _config_of(module.model),
        "epoch_length": epoch_length(module.trainer, module.steps_per_epoch),
        "num_steps": num_steps_of_run(module.trainer, module.steps_per_epoch) if module.steps_per_epoch else None,
        "precision": str(module.trainer.precision),
        "settings": module.run_settings,
        "version": __version__,
    }
    for name in SETTINGS:
        if name in checkpoint:
            checkpoint[name] = masked(dict(checkpoint[name]))
    checkpoint["radixtrain_rates"] = None if module.rates is None else asdict(module.rates)


def check_same_model(checkpoint: Mapping[str, Any], module: Any) -> None:
    """UserError if the checkpoint is of another model: other adapters, configuration or frozen weights."""
    state = checkpoint.get("radixtrain", {})
    if changed := parts_of_the_model(checkpoint.get("hyper_parameters", {}), module.hparams):
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


def _frozen(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def _digest(tensors: Iterable[Tensor]) -> str:
    """Of their bytes, one tensor after the other. Sharded ones are gathered: every rank calls this."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
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
        if name in here and plain(saved[name]) != plain(here[name]):
            return f"{name} was {saved[name]} and is {here[name]}"
    return ""
