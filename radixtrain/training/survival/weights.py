"""The weights of a checkpoint: which names it must have, and how they get into a module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from radixtrain.checkpoints import folder
from radixtrain.checkpoints.choice import resolve
from radixtrain.checkpoints.sharded import parts_like
from radixtrain.errors import UserError

__all__ = ["check_weights", "is_partial", "load_weights", "read_checkpoint", "trained_names"]


def read_checkpoint(ckpt_path: str) -> dict[str, Any]:
    """A checkpoint that `fit` wrote, without the optimizer: `hyper_parameters`, `state_dict` and others, on the CPU.

    ckpt_path: see `resolve`; the output_dir of a run stands for its newest checkpoint.

    Raises UserError if there is none, if it is damaged, or if it is no checkpoint of radixtrain. No code in it is run.
    """
    checkpoint = folder.read_checkpoint(resolve(ckpt_path, Path()), leave_out=["optimizer_states"])
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
    """Whether it holds only what is trained, such as adapters, and a digest of the other weights."""
    return bool((checkpoint.get("radixtrain") or {}).get("partial"))


def trained_names(module: nn.Module) -> set[str]:
    """The names in a module's `state_dict` of what training changes: all that a partial checkpoint holds."""
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def check_weights(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """UserError if the weights of a checkpoint do not fit this module: another model, or LoRA in only one of them."""
    state: Mapping[str, Tensor] = module.state_dict()
    names = trained_names(module) if is_partial(checkpoint) else state.keys()
    here = {name: tuple(tensor.shape) for name, tensor in state.items() if name in names}
    there = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
    for name in (*here, *there):
        if here.get(name) != there.get(name):
            raise UserError(
                f"ckpt_path: the checkpoint is of another model than the configuration's: {name} is "
                f"{there.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} here; give the --model "
                f"keys of the run that wrote it"
            )
