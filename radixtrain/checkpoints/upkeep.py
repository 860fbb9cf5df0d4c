"""A folder of checkpoints is kept in order: leftovers, how many are kept, the links `last` and `best`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from radixtrain.checkpoints.manifest import committed
from radixtrain.checkpoints.replacing import remove, sync_folder, tidy_leftovers
from radixtrain.errors import UserError

__all__ = ["point", "prune", "tidy"]

OURS = re.compile(r"step=\d+")  # what a run names its checkpoints; one of another name is the user's


def tidy(folder: Path) -> None:
    """Remove what killed writes left, and put back what they were replacing. Only for who holds the run's lock."""
    if Path(folder).is_dir():
        tidy_leftovers(Path(folder))


def prune(folder: Path, limit: int, keep: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints `step=N` until `limit` are left. Those of `keep` stay, and do not count."""
    assert limit >= 1, limit
    kept = {Path(path).resolve() for path in keep}
    ours = [path for _, path in committed(Path(folder)) if OURS.fullmatch(path.name) and path.resolve() not in kept]
    for path in reversed(ours[limit:]):
        remove(path)


def point(folder: Path, name: str, target: Path) -> None:
    """A link `name` in the folder to a checkpoint in it; it replaces the previous one in one step.

    A file with the checkpoint's name on disks that have no links. OSError if neither can be written.

    Raises UserError if a folder has that name.
    """
    folder = Path(folder).resolve()
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        raise UserError(f"{folder / name} is a folder, and would be replaced by a link to {target}; move it away")
    new = folder / f".{name}.partial"
    new.unlink(missing_ok=True)
    relative = os.path.relpath(Path(target).resolve(), folder)
    try:
        new.symlink_to(relative)
    except (NotImplementedError, PermissionError):
        new.write_text(f"{relative}\n", encoding="utf-8")
    new.replace(folder / name)
    sync_folder(folder)
