"""The JSON files of a model folder: which one is damaged, since transformers passes over some and names few."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from radixtrain.errors import UserError

__all__ = ["MODEL_JSON", "TOKENIZER_JSON", "check_json_files"]

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
