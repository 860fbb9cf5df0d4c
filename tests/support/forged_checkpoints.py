"""Checkpoints of somebody else's making: of little content, or changed so that their checksums are right again."""

import json
from pathlib import Path
from typing import Any

from radixtrain.checkpoints.folder import CHECKSUMS, FILES, RUN
from radixtrain.checkpoints.tensors import digest_of_file

__all__ = ["a_run", "forge", "sign"]


def a_run(step: int = 3, **changed: Any) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, as `checkpoint_of` makes it."""
    position = {"num_batches": step, "num_steps": step, "validation_pending": False}
    made = {"version": "0", "step": step, "num_skipped": 0, "position": position, "rows": {}, "generators": []}
    settings = {"numbers": {}, "model": {}, "data": {}, "config": {}, "base": None, "record": {}, "wandb_run": ""}
    return {**made, **settings, **changed}


def forge(checkpoint: Path, place: tuple[Any, ...], value: Any) -> None:
    """Write a value into the run, at a place: keys and positions from its root."""
    path = checkpoint / RUN
    run = entry = json.loads(path.read_text())
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    path.write_text(json.dumps(run))
    sign(checkpoint)


def sign(checkpoint: Path) -> None:
    """Write the checksums that its files have now."""
    lines = (f"{digest_of_file(checkpoint / name).xxh3_128}  {name}\n" for name in FILES)
    (checkpoint / CHECKSUMS).write_text("".join(lines))
