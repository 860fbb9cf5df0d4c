"""`about.json` of an entry: digests of its files, what became of its rows, and a checksum of this file itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ABOUT", "read_about", "write_about"]

ABOUT = "about.json"


def write_about(entry: Path, about: Mapping[str, Any]) -> None:
    """about: what JSON can hold."""
    text = json.dumps({**about, "checksum": _checksum(about)})
    (entry / ABOUT).write_text(text, encoding="utf-8")


def read_about(entry: Path) -> dict[str, Any]:
    """What was written. ValueError if the file was changed since, OSError if it cannot be read."""
    try:
        about = json.loads((entry / ABOUT).read_text(encoding="utf-8"))
        is_whole = about.pop("checksum", None) == _checksum(about)
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{ABOUT} is not as it was written")
    return about


def _checksum(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
