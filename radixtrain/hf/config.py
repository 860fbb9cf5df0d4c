"""A model's configuration files: config.json, and which of its JSON files is damaged. No code of a model is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from radixtrain.errors import UserError, first_line
from radixtrain.text_files import read_text

MAX_CHARACTERS = 300  # of a message that was not written for users
OWN_CODE = (
    "it comes with its own code (auto_map), which radixtrain does not run; read that code, load the model in a script "
    "of your own with trust_remote_code=True and pass it to radixtrain.share_prefixes"
)


def read_config(model_name_or_path: str) -> Any:
    """Read the configuration of a folder or hub name without running its code. Raises UserError if it cannot."""
    check_names(model_name_or_path, MODEL_NAMES)
    try:
        return AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=False)
    except Exception as error:  # a value of a wrong type ends in any kind of error
        check_json_files(model_name_or_path, ["config.json"])
        raise UserError(f"{model_name_or_path}: cannot read the model's config.json: {reason_of(error)}") from None


def check_attention_name(attn_implementation: str) -> None:
    """Raise UserError for anything but a name of transformers: `org/kernel@revision` is code of the hub."""
    if not NAME.fullmatch(attn_implementation):
        raise UserError(
            f"attn_implementation {attn_implementation!r}: {KERNEL}; name one of transformers', such as sdpa"
        )


def check_names(model_name_or_path: str, files: Iterable[str]) -> None:
    """Raise UserError if one of these files of a model names code, other weights, or a file outside its folder.

    Also refuses a pipe or a device in the folder, which would be read without end.

    files: JSON. Missing ones, and those that hold no object, are skipped.
    """
    for path in Path(model_name_or_path).iterdir() if Path(model_name_or_path).is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path}: not a file but a device, a pipe or a socket; remove it")
    for file in files:
        for key, value in _entries(_object_in(model_name_or_path, file)):
            if reason := _why_refused(key, value, model_name_or_path):
                raise UserError(f"{model_name_or_path}: {file}: {key} is {value!r}, {reason}; remove that")


def _why_refused(key: str, value: Any, folder: str) -> str:
    """Say why a value is refused; empty if it names nothing outside. key: with its sections, separated by dots."""
    last, is_text = key.rpartition(".")[2], isinstance(value, str)
    if "implementation" in key and is_text and not NAME.fullmatch(value):
        return KERNEL
    if (last == "use_pretrained_backbone" and value) or (last in BACKBONES and is_text and re.search("[/:]", value)):
        return "which is another model"
    if (last == "transformers_weights" or key.startswith("weight_map.")) and value != Path(str(value)).name:
        return "which is not a file of the model's folder"
    if is_text and last.endswith(PATHS) and not last.endswith("name_or_path") and _leads_out(value, folder):
        return "a file outside of the model's folder"
    return ""


def _leads_out(value: str, folder: str) -> bool:
    """Return whether a file of this name exists outside the folder."""
    home = Path(folder).resolve()
    try:
        places = [place for place in (Path(value).expanduser(), home / value) if place.exists()]
        return any(not place.resolve().is_relative_to(home) for place in places)
    except (OSError, ValueError, RuntimeError):  # no name of a file
        return False


def _entries(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a list or mapping, with its key and the sections that it is in."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _entries(entry, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for entry in value:
            yield from _entries(entry, key)
    else:
        yield key, value


def _object_in(model_name_or_path: str, file: str) -> Any:
    """Read a JSON file; empty if it is missing or damaged, which its readers report themselves."""
    folder = Path(model_name_or_path)
    try:
        path = folder / file if folder.is_dir() else Path(cached_file(model_name_or_path, file) or "")
        found = json.loads(read_text(path))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def end_tokens(model_name_or_path: str) -> set[int]:
    """Return the ids at which generation stops: of generation_config.json, else of config.json; empty if unknown."""
    for file in ("generation_config.json", "config.json"):
        ids = _object_in(model_name_or_path, file).get("eos_token_id")
        if found := {each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)}:
            return found
    return set()


def reason_of(error: Exception) -> str:
    """Return transformers' message in one line; if it asks to trust a model's code, what to do instead."""
    if "trust_remote_code" in str(error):
        return OWN_CODE
    if "scaled_dot_product_attention" in str(error):  # transformers' message is about another way to load a model
        return "its class has no sdpa attention; set model.attn_implementation: auto"
    if isinstance(error, (OSError, ValueError, ImportError, SafetensorError)):
        return first_line(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_CHARACTERS]


NAME = re.compile(r"(paged\|)?\w+")
KERNEL = "which is code of the hub and is not run"
BACKBONES = ("backbone", "architecture")
PATHS = ("file", "path", "dir", "folder")  # how names of such keys end
MODEL_NAMES = ("config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json")
MODEL_JSON = ("config.json", "generation_config.json")
TOKENIZER_JSON = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def check_json_files(folder: str, names: Iterable[str]) -> None:
    """Raise UserError that names the first of these files that holds no JSON object, and where it stops being one.

    folder: `model_name_or_path`. A hub name is not checked: downloads are complete.
    names: missing files are skipped.
    """
    for path in (Path(folder, name) for name in names):
        if path.is_file() and (reason := _why_no_object(path)):
            raise UserError(f"{path}: expected a JSON object, {reason}; copy or download the file again")


def _why_no_object(path: Path) -> str:
    """Say why a file holds no JSON object; empty if it holds one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return "the file is not UTF-8"
    except json.JSONDecodeError as error:
        return f"line {error.lineno} column {error.colno}: {error.msg}" if error.pos else "the file is not JSON"
    except RecursionError:
        return "the file is nested too deep"
    return "" if isinstance(found, dict) else f"found a {type(found).__name__}"
