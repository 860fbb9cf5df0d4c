"""A model as a Hugging Face folder, LoRA merged: at the end of `fit`, or `radixtrain export` of a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli
from transformers.utils.logging import disable_progress_bar

from radixtrain.commands.hub import check_hub, push
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_folder import locked_model
from radixtrain.training.fault_tolerance.run_state import load_weights, read_checkpoint
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_folder import card_and_settings, check_model_folder, save_hf_folder
from radixtrain.training.results.run_progress import print_line
from radixtrain.training.results.saved_config import SaveMaskedConfig
from radixtrain.training.results.summary import RunSummary
from radixtrain.training.start.run_overview import system_prompt


def export(
    ckpt_path: str,
    output_dir: str,
    chat_template_path: str | None = None,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    hub_private_repo: bool = True,
) -> Path:
    """Write the model of a checkpoint as a folder that `from_pretrained` loads, with a model card.

    Args:
        ckpt_path: a folder in `<output_dir>/checkpoints`, such as `step=500`, `last` or `best`; or the output_dir, for
            its newest whole one.
        output_dir: the folder to write: absent, empty, or an earlier model, which is replaced.
        chat_template_path: a Jinja file in place of the tokenizer's own chat template.
        push_to_hub: upload the folder to the Hugging Face hub.
        hub_model_id: NAME or OWNER/NAME there; null takes the name of output_dir.
        hub_private_repo: of a repository that is new.

    Raises:
        UserError: the checkpoint is missing, is damaged, or was not written by radixtrain; or another command is at
            work in the folder; or nobody is logged in to the hub.
    """
    check_hub(push_to_hub, hub_model_id)
    check_model_folder(output_dir, [ckpt_path])
    with locked_model(Path(output_dir), "export"):
        if ckpt_path in ("last", "best"):
            raise UserError(f"ckpt_path {ckpt_path}: of which run? write RUN/checkpoints/{ckpt_path}")
        checkpoint = read_checkpoint(ckpt_path)
        with restoring(ckpt_path):
            module = _restored(checkpoint)
            assert module.model is not None
            tokenizer = load_tokenizer(module.hparams.model_name_or_path, chat_template_path)
            documents = _documents(checkpoint, tokenizer)
        folder = save_hf_folder(module.model, tokenizer, output_dir, documents)
        if push_to_hub:
            push(folder, hub_model_id or Path(output_dir).resolve().name, hub_private_repo)
        return folder


def run(argv: Sequence[str]) -> None:
    """The command line of `export`."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # PEFT asks by transformers' former name
    folder = auto_cli(export, list(argv)[1:], as_positional=False, prog="radixtrain export", exit_on_error=False)
    print_line("model", folder)


def _restored(checkpoint: Mapping[str, Any]) -> RadixModule:
    module = RadixModule(**_settings(checkpoint["hyper_parameters"]))
    module.configure_model()
    load_weights(module, checkpoint)
    return module


def _documents(checkpoint: Mapping[str, Any], tokenizer: Any) -> dict[str, str]:
    """The card and the settings. A checkpoint keeps those of `model` and `data`, and no losses."""
    config = {
        "model": _settings(checkpoint["hyper_parameters"]),
        "data": _settings(checkpoint.get("datamodule_hyper_parameters", {})),
    }
    results = {"steps": str(checkpoint.get("global_step", ""))}
    return card_and_settings(config, results, {}, has_chat_template=tokenizer.chat_template is not None)


def _settings(hparams: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hparams.items() if not name.startswith("_")}


def export_run(trainer: Any, module: Any, data: Any, summary: RunSummary, output_dir: Path, settings: Any) -> None:
    """Write `model/` and the end of the summary, say it, and upload it. With several ranks each of them calls it.

    module, data: a `RadixModule` and an `SFTData` after a `fit` of the trainer. settings: of the command.
    """
    results = summary.choose_weights(trainer, module)
    tokenizer = load_tokenizer(data.hparams.model_name_or_path, data.hparams.chat_template_path)
    config = _written_config(trainer)
    if prompt := data.encoder().system_prompt:
        config["data"]["system_prompt"] = prompt  # the text: the folder names no file outside of itself
    texts = card_and_settings(
        config,
        results,
        {"rows": str(data.reports["train"])},
        has_chat_template=tokenizer.chat_template is not None,
        system=system_prompt(data),
    )
    folder = save_hf_folder(module.model, tokenizer, output_dir / "model", texts)
    summary.close(trainer, module, folder)
    if settings.push_to_hub:
        name = settings.hub_model_id or output_dir.resolve().name
        ranks().broadcast_from_rank0(lambda: push(folder, name, settings.hub_private_repo), long_timeout=True)


def _written_config(trainer: Any) -> dict[str, Any]:
    """What `config.yaml` of the run holds."""
    saved = next(callback for callback in trainer.callbacks if isinstance(callback, SaveMaskedConfig))
    return yaml.safe_load(saved.text())
