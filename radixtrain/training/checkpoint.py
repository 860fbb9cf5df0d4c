"""A trained model as a Hugging Face folder: safetensors, tokenizer, chat template. Written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixtrain.model import restore_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["save_hf_folder"]


def save_hf_folder(model: Any, tokenizer: PreTrainedTokenizerBase, output_dir: str | os.PathLike[str]) -> Path:
    """Write `model` and `tokenizer` so that `from_pretrained(output_dir)` loads them.

    model: a `PreTrainedModel` or a PEFT model, whose adapters are merged into the weights. Loses its radix hooks.
    output_dir: replaced as a whole; a crash leaves what was there before.
    """
    target = Path(output_dir)
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    restore_model(model)
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    merged.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    return target
