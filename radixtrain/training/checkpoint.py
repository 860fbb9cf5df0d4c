"""Checkpoints of a run, and the trained model as a Hugging Face folder, which is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from radixtrain.errors import UserError
from radixtrain.hf.prepare import restore_model
from radixtrain.training.model_card import CARD, MARK, SETTINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_checkpoint_file", "check_model_folder", "check_weights", "read_checkpoint", "save_hf_folder"]

# What `save_pretrained` of models and tokenizers writes. Full names, since *.json would match a user's data too.
MODEL_FILES = [
    *("config.json", "generation_config.json", "chat_template.jinja", "adapter"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", SETTINGS),
]


def check_checkpoint_file(ckpt_path: str) -> None:
    """UserError if there is no such file, or if it is not of torch's format (a zip file). Reads only its end."""
    if not Path(ckpt_path).is_file():
        raise UserError(f"ckpt_path: no such file: {ckpt_path}")
    if not zipfile.is_zipfile(ckpt_path):
        raise UserError(
            f"ckpt_path {ckpt_path}: not a checkpoint of radixtrain, or one that was not written to its end; those of "
            f"a run are in its output_dir, in checkpoints/"
        )


def read_checkpoint(ckpt_path: str) -> dict[str, Any]:
    """A checkpoint that `fit` wrote: `hyper_parameters`, `state_dict` and whatever else Lightning keeps, on the CPU.

    Raises UserError if there is no such file, or if it is no checkpoint of radixtrain. No code in it is run.
    """
    check_checkpoint_file(ckpt_path)
    try:
        checkpoint = torch.load(ckpt_path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is no checkpoint
        raise UserError(f"ckpt_path {ckpt_path}: not a checkpoint of radixtrain: {type(error).__name__}") from error
    if not isinstance(checkpoint, dict) or not {"hyper_parameters", "state_dict"} <= checkpoint.keys():
        raise UserError(f"ckpt_path {ckpt_path}: not a checkpoint of radixtrain: no hyper_parameters and state_dict")
    return checkpoint


def check_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """UserError if the weights of a checkpoint do not fit this module: another model, or LoRA in only one of them."""
    here = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    there = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in (*here, *there):
        if here.get(name) != there.get(name):
            raise UserError(
                f"ckpt_path: the checkpoint is of another model than the configuration's: {name} is "
                f"{there.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} here; give the --model "
                f"keys of the run that wrote it"
            )


def check_model_folder(output_dir: str | os.PathLike[str], reads: Iterable[str | os.PathLike[str] | None] = ()) -> Path:
    """The folder, if a model may be written there: absent, empty, or a previous model that can be replaced.

    reads: files and folders that the run reads; none of them may lie inside.

    Raises UserError for anything else, since the folder is replaced as a whole.
    """
    target = Path(output_dir).resolve()
    for source in reads:
        if source is not None and Path(source).exists() and Path(source).resolve().is_relative_to(target):
            raise UserError(
                f"{output_dir} would be replaced by the model, but {source} is read from there; choose another"
            )
    if target.exists() and not target.is_dir():
        raise UserError(f"{output_dir} is a file; the model needs a folder")
    inside = list(target.iterdir()) if target.exists() else []
    foreign = [path.name for path in inside if not _is_written_by_us(path)]
    if foreign or (inside and not (target / "config.json").is_file()):
        named = ", ".join(sorted(foreign)[:3]) or "no config.json"
        raise UserError(f"{output_dir} holds what is no model ({named}) and would be replaced; choose an empty folder")
    return target


def save_hf_folder(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike[str],
    documents: Mapping[str, str] | None = None,
) -> Path:
    """Write `model` and `tokenizer` so that `from_pretrained(output_dir)` loads them.

    model: a `PreTrainedModel`, or a PEFT model, whose adapters go into `adapter/` and are merged into the weights.
        It loses its radix hooks.
    output_dir: replaced as a whole once the new one is complete; see `check_model_folder`.
    documents: names and texts of files beside them, see `radixtrain/training/model_card.py`.
    """
    target = check_model_folder(output_dir)
    staging, replaced = (target.with_name(f".{target.name}.{what}") for what in ("partial", "replaced"))
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # an earlier run was killed between the two renames below
    for leftover in (staging, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    restore_model(model)
    if hasattr(model, "merge_and_unload"):
        model.save_pretrained(staging / "adapter")
        model = model.merge_and_unload()
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    for name, text in (documents or {}).items():
        (staging / name).write_text(text, encoding="utf-8")
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    return Path(output_dir)


def _is_written_by_us(path: Path) -> bool:
    """A README.md only if it is a model card of ours."""
    if path.name == CARD and path.is_file():
        return MARK in path.read_text(encoding="utf-8", errors="replace")
    return any(path.match(pattern) for pattern in MODEL_FILES)
