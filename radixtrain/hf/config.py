"""A model's configuration files: config.json, and which of its JSON files is damaged. No code of a model is run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from radixtrain.errors import UserError, first_line

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


MODEL_JSON = ("config.json", "generation_config.json")
TOKENIZER_JSON = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def check_json_files(folder: str, names: Iterable[str]) -> None:
    """UserError that names the first of these files that does not hold a JSON object, and where it stops being one.

    folder: `model_name_or_path`. A hub name is not looked at: what was downloaded is whole.
    names: those that the folder does not have are left out.
    """
    for path in (Path(folder, name) for name in names):
        if path.is_file() and (reason := _why_no_object(path)):
            raise UserError(f"{path}: expected a JSON object, {reason}; copy or download the file again")


def _why_no_object(path: Path) -> str:
    """Nothing if it is one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return "the file is not UTF-8"
    except json.JSONDecodeError as error:
        return f"line {error.lineno} column {error.colno}: {error.msg}" if error.pos else "the file is no JSON"
    except RecursionError:
        return "the file is nested too deep"
    return "" if isinstance(found, dict) else f"found a {type(found).__name__}"
