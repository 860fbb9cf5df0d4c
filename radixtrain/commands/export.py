"""`radixtrain export`: a Lightning checkpoint -> a Hugging Face folder, LoRA adapters merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from radixtrain.data.tokenization import load_tokenizer
from radixtrain.training.checkpoint import check_model_folder, read_checkpoint, save_hf_folder
from radixtrain.training.module import RadixModule

__all__ = ["export", "run"]


def export(ckpt_path: str, output_dir: str, chat_template_path: str | None = None) -> Path:
    """Write the model of a checkpoint as a folder that `from_pretrained` loads.

    Args:
        ckpt_path: a `.ckpt` written by `fit`, in `<output_dir>/checkpoints` of that run.
        output_dir: the folder to write: absent, empty, or an earlier model, which is replaced as a whole.
        chat_template_path: a Jinja file in place of the tokenizer's own chat template.

    Raises:
        UserError: the checkpoint is missing, cannot be read, or was not written by radixtrain.
    """
    check_model_folder(output_dir, [ckpt_path])
    module = _restored(ckpt_path)
    assert module.model is not None
    tokenizer = load_tokenizer(module.hparams.model_name_or_path, chat_template_path)
    return save_hf_folder(module.model, tokenizer, output_dir)


def run(argv: Sequence[str]) -> None:
    """The command line of `export`."""
    parser = ArgumentParser(prog="radixtrain export", exit_on_error=False)
    parser.add_function_arguments(export)
    folder = export(**parser.parse_args(list(argv)[1:]).as_dict())
    print(f"model: {folder}")  # noqa: T201


def _restored(ckpt_path: str) -> RadixModule:
    checkpoint = read_checkpoint(ckpt_path)
    hparams = checkpoint["hyper_parameters"]
    module = RadixModule(**{name: value for name, value in hparams.items() if not name.startswith("_")})
    module.configure_model()
    module.load_state_dict(checkpoint["state_dict"])
    return module
