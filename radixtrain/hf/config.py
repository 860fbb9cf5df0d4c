"""A model's config.json."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from radixtrain.errors import UserError, first_line

__all__ = ["read_config"]


def read_config(model_name_or_path: str) -> Any:
    """The configuration of a folder or hub name. UserError if it cannot be read."""
    try:
        return AutoConfig.from_pretrained(model_name_or_path)
    except (OSError, ValueError) as error:
        raise UserError(f"{model_name_or_path}: cannot read the model's config.json: {first_line(error)}") from None
