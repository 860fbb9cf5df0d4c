"""The checkpoints of a run: which one it resumes from, how many are kept, and the links `last` and `best`."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from radixtrain.checkpoints.atomic import current_path, new_file, remove, sync_folder
from radixtrain.checkpoints.folder import (
    DamagedCheckpoint,
    checkpoints_in,
    committed,
    is_checkpoint,
    read_run,
    verify_checkpoint,
)
from radixtrain.errors import UserError, only_warns

logger = logging.getLogger(__name__)

LINKS = ("last", "best")
AUTO = "auto"  # of `fit`: the newest whole checkpoint if there is any, else a start


@dataclass(frozen=True)
class NewestValid:
    """The newest whole checkpoint. path: its folder, or None. passed_over: a line for each newer, damaged one."""

    path: Path | None
    passed_over: list[str] = field(default_factory=list)


def newest_valid(folder: Path) -> NewestValid:
    """Find the newest whole checkpoint of a folder."""
    passed_over: list[str] = []
    for path in sorted(checkpoints_in(Path(folder)), key=_age, reverse=True):
        try:
            verify_checkpoint(path)
            return NewestValid(path, passed_over)
        except UserError as error:
            passed_over.append(str(error))
    return NewestValid(None, passed_over)


def resolve(text: str, folder: Path) -> Path:
    """Return the checkpoint that `--ckpt_path` names: a whole one, with a warning for each newer one that is not.

    text: `last` or `auto`, the newest whole one of `folder`; `best`; a checkpoint folder; the links `last` and `best`
        in a folder of checkpoints; such a folder or the output_dir of a run, for its newest whole one.

    Raises UserError if there is none, or if the one that is named is damaged; it names one that is whole.
    """
    if text == AUTO:
        return _newest(Path(folder), text)
    path = Path(folder) / text if text in LINKS else Path(text)
    if path.name == "last" and (path.is_symlink() or not path.is_dir()):
        return _newest(path.parent, text)
    path = current_path(target_of(path) if path.name == "best" else path)
    if (path / "config.json").is_file():
        raise UserError(f"ckpt_path {text}: a model, not a checkpoint; give it as model.model_name_or_path")
    if path.is_file():
        raise UserError(f"ckpt_path {path}: a file; a checkpoint of radixtrain is a folder{_otherwise(path.parent)}")
    if is_checkpoint(path):
        return _checked(path)
    if path.is_dir():
        return _newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path, text)
    if text == "best":
        reason = "it was removed, or save_best was not set"
        raise UserError(f"ckpt_path best: none in {path.parent}: {reason}{_otherwise(path.parent)}")
    raise UserError(f"ckpt_path: no such checkpoint: {text}{_otherwise(path.parent)}")


def _newest(folder: Path, text: str) -> Path:
    newest = newest_valid(folder)
    if newest.path is None:
        reasons = "; ".join(newest.passed_over)
        why = f" ({reasons})" if reasons else "; --ckpt_path auto starts a new run if there is none"
        raise UserError(f"ckpt_path {text}: no whole checkpoint in {folder}{why}")
    for line in newest.passed_over:
        logger.warning("skipped: %s; using instead: %s", line, newest.path)
    return newest.path


def _checked(path: Path) -> Path:
    try:
        verify_checkpoint(path)
    except DamagedCheckpoint as error:
        raise UserError(f"ckpt_path {error}{_otherwise(path.parent)}") from error
    return path


def _otherwise(folder: Path) -> str:
    other = newest_valid(folder).path
    return f"; {other} is whole and can be used" if other else ""


def target_of(link: Path) -> Path:
    """Return the target of a link made by `point`: a symbolic link, or a file with the name of what is beside it."""
    if link.is_file():
        return link.with_name(link.read_text(encoding="utf-8", errors="replace").strip()[:255] or "nothing")
    return link.parent / link.readlink() if link.is_symlink() else link


def _age(path: Path) -> tuple[float, float, str]:
    """Return a key that sorts checkpoints by age. One that does not say it may be the newest."""
    try:
        run = read_run(path)
        return run["sequence"], run["step"], path.name
    except DamagedCheckpoint:
        return math.inf, math.inf, path.name


NAME_OF_STEP = re.compile(r"step=\d+")  # how a run names its checkpoints; other names are the user's


def prune(folder: Path, limit: int, keep: Path | None = None) -> None:
    """Delete the oldest checkpoints `step=N` until `limit` are left. `keep` stays, and does not count."""
    assert limit >= 1, limit
    kept = keep and keep.resolve()
    ours = [path for _, path in committed(Path(folder)) if NAME_OF_STEP.fullmatch(path.name) and path.resolve() != kept]
    for path in reversed(ours[limit:]):
        with only_warns(f"old checkpoints of {folder} cannot be deleted"):
            remove(path)


def point(folder: Path, name: str, target: Path) -> None:
    """Link `name` in the folder to a checkpoint in it, replacing the previous link in one step.

    On disks without links it is a file with the checkpoint's name. Raises OSError if neither can be written.

    Raises UserError if a folder has that name.
    """
    folder = Path(folder).resolve()
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        runs = {path.name: run for run, path in committed(folder)}
        if runs.pop(name, None) not in runs.values():
            raise UserError(f"{folder / name} is a folder, and would be replaced by a link to {target}; move it away")
        remove(folder / name)  # a copy of the folder has followed the link
    new = folder / f".{name}.partial"
    new.unlink(missing_ok=True)
    relative = os.path.relpath(Path(target).resolve(), folder)
    try:
        new.symlink_to(relative)
    except (NotImplementedError, PermissionError):
        new_file(new).write_text(f"{relative}\n", encoding="utf-8")
    new.replace(folder / name)
    sync_folder(folder)
