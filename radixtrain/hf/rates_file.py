"""The rates of a machine on disk: a JSON file with a checksum, written once; only a damaged one is replaced.

So a resumed run chooses as it did before. Delete the folder to measure again. The folder is `$RADIXTRAIN_CACHE`, or
`radixtrain` in `$XDG_CACHE_HOME` or `~/.cache`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from radixtrain.tree.cost_model import Rates

__all__ = ["OLDER", "cache_folder", "file_of", "keep_rates", "rates_in", "read_rates"]

logger = logging.getLogger(__name__)
OLDER = "it has no checksum: an older version of radixtrain wrote it"


def cache_folder() -> Path:
    """Where calibrations are kept."""
    if os.environ.get("RADIXTRAIN_CACHE"):
        return Path(os.environ["RADIXTRAIN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixtrain"


def file_of(key: Mapping[str, Any]) -> Path:
    """The file for everything that the rates depend on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"rates-{digest}.json"


def read_rates(path: Path) -> Rates | None:
    """None if there is no file, or a damaged one: then the log says why, and `keep_rates` replaces it."""
    try:
        return rates_in(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged, and the machine is measured again: %s", path, error)
        return None


def rates_in(path: Path) -> Rates:
    """The rates in a file. ValueError that says what is wrong with its content, OSError if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "checksum" not in content:
            raise ValueError(OLDER)
        if content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum does not fit its content")
        rates = content["rates"]
        numbers = {**rates, **(rates.get("runs") or {}), "runs": 0}
        if not all(0 <= rate < float("inf") for rate in numbers.values()):
            raise ValueError(f"rates must be finite and not negative, got {rates}")
        return Rates.from_dict(rates)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a file of rates ({type(error).__name__})") from None


def keep_rates(path: Path, rates: Rates, key: Mapping[str, Any]) -> Rates:
    """Write the file, unless another process was first: its rates are returned then. The log says what fails."""
    content = {"rates": asdict(rates), **key}
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(text, encoding="utf-8")
            if _is_damaged(path):
                os.replace(written, path)
            else:
                os.link(written, path)
    except OSError as error:
        if path.is_file():
            return read_rates(path) or rates
        logger.warning("the calibration cannot be kept: %s", error)
    return rates


def _is_damaged(path: Path) -> bool:
    try:
        rates_in(path)
    except ValueError:
        return True
    except OSError:
        pass
    return False


def _checksum(content: Mapping[str, Any]) -> str:
    """Of everything in the file but the checksum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
