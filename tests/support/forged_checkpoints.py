"""A checkpoint of somebody else's making: its state is changed, and its checksums are right again."""

import json
from pathlib import Path
from typing import Any

from radixtrain.checkpoints.manifest import Manifest
from radixtrain.checkpoints.tensors import digest_of_file

__all__ = ["forge"]


def forge(checkpoint: Path, place: tuple[Any, ...], value: Any) -> None:
    """Write a value into the state, at a place: keys and positions from its root."""
    path = checkpoint / "state.json"
    state = entry = json.loads(path.read_text())
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    path.write_text(json.dumps(state))
    manifest = Manifest.read(checkpoint)
    manifest.files["state.json"] = digest_of_file(path)
    (checkpoint / "manifest.json").write_bytes(manifest.to_bytes())
