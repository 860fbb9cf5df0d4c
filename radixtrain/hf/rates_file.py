"""The rates of a machine on disk: a JSON file, written once and never overwritten.

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

__all__ = ["cache_folder", "file_of", "keep_rates", "read_rates"]

logger = logging.getLogger(__name__)


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
    """None if there is no file, or one that cannot be read: then the log says why."""
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))["rates"]
        numbers = {**rates, **(rates.get("runs") or {}), "runs": 0}
        if not all(0 <= rate < float("inf") for rate in numbers.values()):
            raise ValueError(f"rates must be finite and not negative, got {rates}")
        return Rates.from_dict(rates)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read and is measured again for this run: %r", path, error)
        return None


def keep_rates(path: Path, rates: Rates, key: Mapping[str, Any]) -> Rates:
    """Write the file, unless another process was first: its rates are returned then. The log says what fails."""
    text = json.dumps({"rates": asdict(rates), **key}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(text, encoding="utf-8")
            os.link(written, path)
    except OSError as error:
        if path.is_file():
            return read_rates(path) or rates
        logger.warning("the calibration cannot be kept: %s", error)
    return rates
