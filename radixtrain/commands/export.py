"""Writes a model as a Hugging Face folder, LoRA merged, for `fit` and `radixtrain export`.

`push_to_hub` of both uploads the folder.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils.logging import disable_progress_bar

from radixtrain.checkpoints.folder import Checkpoint, read_checkpoint
from radixtrain.checkpoints.resolve import resolve
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, first_line
from radixtrain.screen import print_line
from radixtrain.settings.commands import Export, RunSettings
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_folder import locked_model
from radixtrain.training.fault_tolerance.run_state import check_same_model, load_weights
from radixtrain.training.loop import Loop
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_folder import card_and_settings, check_model_folder, save_hf_folder

logger = logging.getLogger(__name__)


def export(settings: Export) -> Path:
    """Write the model of a checkpoint as a folder that `from_pretrained` loads, with a model card.

    Raises:
        UserError: the checkpoint is missing, is damaged, or was not written by radixtrain; or another command uses the
            folder; or without a login to the hub.
    """
    ckpt_path, output_dir = settings.ckpt_path, settings.output_dir
    check_hub(settings.push_to_hub, settings.hub_model_id)
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
        folder = save_hf_folder(module.model, tokenizer, output_dir, documents)
        if settings.push_to_hub:
            name = settings.hub_model_id or Path(output_dir).resolve().name
            push(folder, name, settings.hub_private_repo)
        return folder


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


def export_run(loop: Loop, settings: RunSettings, config: dict[str, Any]) -> None:
    """Write `model/` and the end of the summary, print that, and upload the model. With several ranks, each calls this.

    loop: after a `fit`. settings: of the command. config: what `fit.yaml` of the run holds.
    """
    data, results = loop.datamodule, loop.record.choose_weights()
    tokenizer = load_tokenizer(data.hparams.model_name_or_path, data.hparams.chat_template_path)
    of_data = {**config["data"], "template_date": data.encoder().template_date}
    texts = card_and_settings({**config, "data": of_data}, results, {"rows": str(data.reports["train"])})
    folder = save_hf_folder(loop.module.model, tokenizer, loop.output_dir / "model", texts)
    loop.record.close(folder)
    if settings.push_to_hub:
        name = settings.hub_model_id or loop.output_dir.resolve().name
        ranks().broadcast_from_rank0(lambda: push(folder, name, settings.hub_private_repo), long_timeout=True)


def check_hub(push_to_hub: bool, hub_model_id: str | None) -> None:
    """Raise UserError, before anything is trained, if nothing could be uploaded. Does not use the network."""
    if hub_model_id is not None:
        try:
            validate_repo_id(hub_model_id)
        except HFValidationError as error:
            raise UserError(f"hub_model_id: expected NAME or OWNER/NAME; {first_line(error)}") from None
        if not push_to_hub:
            raise UserError(f"hub_model_id {hub_model_id}: nothing would be uploaded; set push_to_hub: true")
    if push_to_hub and constants.HF_HUB_OFFLINE:
        raise UserError("push_to_hub: HF_HUB_OFFLINE forbids the upload; unset it, or leave push_to_hub out")
    if push_to_hub and get_token() is None:
        raise UserError("push_to_hub: not logged in to the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, hub_model_id: str, private: bool) -> None:
    """Upload a model folder. If that fails, a warning says how to do it later; the folder is unchanged.

    private: whether a new repository is private.
    """
    try:
        api = HfApi()
        repo = api.create_repo(hub_model_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Model trained with radixtrain")
    except Exception as error:  # of the network, the hub or permissions; none may lose the trained model
        logger.warning(
            "push_to_hub: not uploaded: %s. The model is in %s; upload it with: hf upload %s %s",
            *(first_line(error), folder, hub_model_id, folder),
        )
    else:
        print_line("hub", repo)
