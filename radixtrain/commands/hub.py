"""A model folder on the Hugging Face hub: `push_to_hub` of `fit` and `export`."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from radixtrain.errors import UserError, first_line
from radixtrain.training.results.run_progress import print_line

logger = logging.getLogger(__name__)


def check_hub(push_to_hub: bool, hub_model_id: str | None) -> None:
    """UserError, before anything is trained, if nothing could be uploaded. Asks no network."""
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
        raise UserError(
            "push_to_hub: nobody is logged in to the Hugging Face hub: run `hf auth login`, or set HF_TOKEN"
        )


def push(folder: Path, hub_model_id: str, private: bool) -> None:
    """Upload a model folder. If that fails, a warning says how to do it later: the folder stays as it is.

    private: of a repository that is new.
    """
    try:
        api = HfApi()
        repo = api.create_repo(hub_model_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Model trained with radixtrain")
    except Exception as error:  # of the network, of the hub, of permissions: the trained model counts more than any
        logger.warning(
            "push_to_hub: not uploaded: %s. The model is in %s; upload it with: hf upload %s %s",
            *(first_line(error), folder, hub_model_id, folder),
        )
    else:
        print_line("hub", repo)
