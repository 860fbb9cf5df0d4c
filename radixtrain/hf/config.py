"""A model's config.json, and what is said of a model that would run code of its own."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from radixtrain.errors import UserError, first_line
from radixtrain.hf.model_files import check_json_files

__all__ = ["read_config", "reason_of"]

MAX_CHARACTERS = 300  # of a message that was not written to be read
OWN_CODE = (
    "it brings code of its own (auto_map), which radixtrain does not run; read that code, load the model in a script "
    "of your own with trust_remote_code=True and hand it to radixtrain.prepare_model"
)


def read_config(model_name_or_path: str) -> Any:
    """The configuration of a folder or hub name. UserError if it cannot be read. No code that comes with it is run."""
    try:
        return AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=False)
    except Exception as error:  # a value of a wrong type ends in any kind of error
        check_json_files(model_name_or_path, ["config.json"])
        raise UserError(f"{model_name_or_path}: cannot read the model's config.json: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """What transformers says, in one line; if it asks to trust code that comes with a model, what to do instead."""
    if "trust_remote_code" in str(error):
        return OWN_CODE
    if isinstance(error, (OSError, ValueError, ImportError, SafetensorError)):
        return first_line(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_CHARACTERS]
