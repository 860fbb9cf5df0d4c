"""What a checkpoint keeps besides the optimizer: RNG state, a check of the model, and its weights into a module."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from radixtrain import __version__
from radixtrain.checkpoints import folder
from radixtrain.checkpoints.resolve import resolve
from radixtrain.checkpoints.sharded import parts_like, whole
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.training.fault_tolerance.resume import parts_of_the_model

logger = logging.getLogger(__name__)


def add_run_state(checkpoint: dict[str, Any], module: Any, in_step: Mapping[str, Any] | None) -> None:
    """Add `radixtrain` to a checkpoint that Lightning has made of a `RadixModule`.

    in_step: states of this rank's random generators before the step that is being computed; None between two steps.
        Those of all ranks are kept.

    If the weights are partly frozen, only the trained ones are kept, and a digest of the others.
    """
    trained, frozen = trained_names(module), _frozen(module)
    has_base = bool(frozen and trained)
    if has_base:
        checkpoint["state_dict"] = {name: each for name, each in checkpoint["state_dict"].items() if name in trained}
        module.base_digest = module.base_digest or _digest(frozen)
    settings = checkpoint.get("hyper_parameters", {})
    if (base := Path(settings.get("model_name_or_path", ""))).is_dir():
        settings["model_name_or_path"] = str(base.absolute())  # `export` may run in another folder
    checkpoint["radixtrain"] = {
        "position": asdict(module.position),
        "generators": ranks().gather(in_step or generator_states()),
        "skipped": {"num_skipped": module.guard.num_skipped},
        "partial": has_base,
        "base": module.base_digest,
        "config": _config_of(module.model),
        "wandb_run": module.wandb_run,
        "version": __version__,
    }


def check_same_model(checkpoint: Mapping[str, Any], module: Any) -> None:
    """Raise UserError if the checkpoint is of another model: other adapters, configuration or frozen weights."""
    state = checkpoint.get("radixtrain")
    if state is None:
        raise UserError("ckpt_path: not a checkpoint of `radixtrain fit`; name one of those in its output_dir")
    if changed := parts_of_the_model(checkpoint["hyper_parameters"], module.hparams):
        raise UserError(f"ckpt_path: {', '.join(changed)}, which would change the model; use the value of the run")
    if differs := _first_difference(state["config"], _config_of(module.model)):
        raise UserError(f"ckpt_path: the checkpoint is of a model with another configuration: {differs}")
    if state["base"]:
        module.base_digest = _digest(_frozen(module))
        if module.base_digest != state["base"]:
            raise UserError(
                f"ckpt_path: the checkpoint holds only the trained weights, and the others in "
                f"{module.hparams.model_name_or_path} are not those of the run; give the model that it started from"
            )


def _frozen(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def _digest(tensors: Iterable[Tensor]) -> str:
    """Digest the bytes of tensors, one after the other. Sharded ones are gathered: every rank calls this."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Return what in the configuration determines the computation, without names of folders and versions."""
    config = pretrained_model_of(model).config.to_dict()
    left_out = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
    return {name: _json(value) for name, value in config.items() if name not in left_out and not name.startswith("_")}


def _json(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _first_difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe the first difference; keys that only one of them has may come with another version of transformers."""
    changes = (name for name in saved if name in current and saved[name] != current[name])
    return next((f"{name} was {saved[name]} and is {current[name]}" for name in changes), "")


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's random generators, of all CUDA devices too.

    Skips CUDA if the process has not used it: it has drawn nothing there, and a query would initialize CUDA, which a
    forked process cannot do.
    """
    name, keys, *rest = cast(Any, np.random.get_state())  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),  # Lightning's own files hold no arrays
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore what `generator_states` returned. If the number of CUDA devices differs, warn and leave theirs."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    was, now = len(states["cuda"]), torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    if was == now:
        torch.cuda.set_rng_state_all(states["cuda"])
    else:
        logger.warning("the run was on %d CUDA devices and is on %d: dropout will draw other numbers there", was, now)


def set_states_of_ranks(states: list[Mapping[str, Any]]) -> None:
    """Set the random generators of this rank.

    states: of all ranks, by rank. If there is another number of ranks now, dropout draws other numbers than the run
        would have drawn, and the log says so.
    """
    rank, size = ranks().rank, ranks().size
    if len(states) != size:
        logger.info("the run was on %d ranks and is on %d: dropout will draw other numbers", len(states), size)
    if rank < len(states):
        set_generator_states(states[rank])
    else:
        seed_per_rank()


def seed_per_rank() -> None:
    """Seed this rank for its own dropout masks; rank 0 continues as a single process would.

    Called once all that must be equal on the ranks, such as a new adapter, has been drawn from the seed of the run.
    """
    if not ranks().is_first:
        torch.manual_seed(torch.initial_seed() + ranks().rank)


def read_checkpoint(
    ckpt_path: str, leave_out: Sequence[str] = ("optimizer_states",), in_memory: bool = True
) -> dict[str, Any]:
    """Read a checkpoint of `fit`: `hyper_parameters`, `state_dict` and others, on the CPU.

    ckpt_path: see `resolve`; the output_dir of a run stands for its newest checkpoint.
    leave_out, in_memory: see `checkpoints.folder.read_checkpoint`.

    Raises UserError if there is none, if it is damaged, or not a checkpoint of radixtrain. No code in it is run.
    """
    checkpoint = folder.read_checkpoint(resolve(ckpt_path, Path()), leave_out, in_memory)
    if not {"hyper_parameters", "state_dict"} <= checkpoint.keys():
        raise UserError(f"ckpt_path {ckpt_path}: not a checkpoint of radixtrain: no hyper_parameters and state_dict")
    return checkpoint


def load_weights(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load the weights of a checkpoint into a module, which has those of the base model if it holds only adapters.

    The module may be sharded: then every rank calls this, and takes its parts.

    Raises UserError, and changes nothing, unless they are the weights of this module, or exactly its trained ones.
    """
    check_weights(module, checkpoint)
    state = parts_like(checkpoint["state_dict"], module.state_dict())
    module.load_state_dict(state, strict=not is_partial(checkpoint))


def is_partial(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds only trained weights, such as adapters, and a digest of the others."""
    return bool((checkpoint.get("radixtrain") or {}).get("partial"))


def trained_names(module: nn.Module) -> set[str]:
    """Return the names in a module's `state_dict` of what training changes: all that a partial checkpoint holds."""
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def check_weights(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Raise UserError if a checkpoint's weights do not fit this module: another model, or LoRA in only one of them."""
    state: Mapping[str, Tensor] = module.state_dict()
    names = trained_names(module) if is_partial(checkpoint) else state.keys()
    own = {name: tuple(tensor.shape) for name, tensor in state.items() if name in names}
    saved = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
    for name in (*own, *saved):
        if own.get(name) != saved.get(name):
            raise UserError(
                f"ckpt_path: the checkpoint is of another model than the configuration's: {name} is "
                f"{saved.get(name, 'absent')} in the checkpoint and {own.get(name, 'absent')} here; give the --model "
                f"keys of the run that wrote it"
            )
