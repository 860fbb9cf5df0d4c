"""`radixtrain export`: the model of a checkpoint as a Hugging Face folder, LoRA merged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from radixtrain.checkpoints.folder import Checkpoint, read_checkpoint
from radixtrain.checkpoints.resolve import resolve
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.screen import print_line
from radixtrain.settings.commands import Export
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_folder import locked_model
from radixtrain.training.fault_tolerance.run_state import check_same_model, load_weights
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_folder import card_and_settings, check_model_folder, save_hf_folder


def export(settings: Export) -> Path:
    """Write the model of a checkpoint as a folder that `from_pretrained` loads, with a model card.

    Raises:
        UserError: the checkpoint is missing, is damaged, or was not written by radixtrain; or another command uses the
            folder.
    """
    ckpt_path, output_dir = settings.ckpt_path, settings.output_dir
    check_model_folder(output_dir, [ckpt_path])
    with locked_model(Path(output_dir), "export"):
        if ckpt_path in ("last", "best"):
            raise UserError(f"ckpt_path {ckpt_path} names no run; write RUN/checkpoints/{ckpt_path}")
        checkpoint = read_checkpoint(resolve(ckpt_path, Path()), with_moments=False)
        with restoring(ckpt_path):
            base = Path(checkpoint.run["model"]["model_name_or_path"])
            if base.is_absolute() and not base.is_dir():
                raise UserError(
                    f"ckpt_path {ckpt_path}: its tokenizer and configuration are read from {base}: no such folder"
                )
            module = _restored(checkpoint)
            assert module.model is not None
            tokenizer = load_tokenizer(module.hparams.model_name_or_path, settings.chat_template_path)
            documents = _documents(checkpoint)
        return save_hf_folder(module.model, tokenizer, output_dir, documents)


def run(settings: Export, words: Sequence[str]) -> None:
    """Run the command line of `export`."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # PEFT asks by transformers' former name
    print_line("model", export(settings))


def _restored(checkpoint: Checkpoint) -> RadixModule:
    module = RadixModule(**checkpoint.run["model"])
    module.configure_model()
    check_same_model(checkpoint, module)
    load_weights(module, checkpoint)
    return module


def _documents(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the card and the settings. A checkpoint keeps those of `model` and `data`, but no losses."""
    config = {name: checkpoint.run[name] for name in ("model", "data")}
    results = {"steps": str(checkpoint.run["step"])}
    return card_and_settings(config, results, {})
