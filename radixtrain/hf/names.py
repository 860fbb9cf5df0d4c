"""Names of transformers that a release has changed, the newest spelling first. Others have one spelling from 5.2 on.

What an object shows comes before its name: a cache is a `Cache`, an argument has an annotation. So the next renaming
mostly changes nothing.
"""

from __future__ import annotations

from typing import Any

CACHE = ("cache", "past_key_values", "cache_params")  # an argument of models and layers, an output; since 5.24
IMAGE_TOKEN = ("image_token_id", "image_token_index")  # a setting; some configurations have both
START_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # methods; since 5.23
STOP_CHECKPOINTING = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
OF_OLDER_MASKS = ("cache_position", "allow_torch_fix")  # keywords of a mask function; gone since 5.23


def found(owner: object, names: tuple[str, ...]) -> Any:
    """Return the first of these attributes that an object has; None if it has none."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


def is_cache(name: str, annotation: object) -> bool:
    """Return whether an argument or an output is Hugging Face's cache, by its annotation or its name."""
    return "Cache" in str(annotation) or name in CACHE
