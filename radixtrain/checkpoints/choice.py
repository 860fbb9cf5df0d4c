"""Which checkpoint a run goes on from: the newest that is whole, or what `--ckpt_path` names."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from radixtrain.checkpoints.folder import verify_checkpoint
from radixtrain.checkpoints.manifest import DamagedCheckpoint, Manifest, checkpoints_in, is_checkpoint
from radixtrain.checkpoints.replacing import standing
from radixtrain.errors import UserError

__all__ = ["Choice", "newest_valid", "resolve"]

logger = logging.getLogger(__name__)

LINKS = ("last", "best")


@dataclass(frozen=True)
class Choice:
    """path: the newest whole checkpoint, or None. passed_over: a line for each one before it, which is not whole."""

    path: Path | None
    passed_over: list[str] = field(default_factory=list)


def newest_valid(folder: Path) -> Choice:
    """The newest whole checkpoint of a folder. Files of earlier versions come after all folders, by their time."""
    passed_over: list[str] = []
    for path in _newest_first(Path(folder)):
        try:
            verify_checkpoint(path)
            return Choice(path, passed_over)
        except UserError as error:
            passed_over.append(str(error))
    return Choice(None, passed_over)


def resolve(text: str, folder: Path) -> Path:
    """The checkpoint that `--ckpt_path` names: whole, and a warning for each newer one that is not.

    text: `last`, the newest whole one of `folder`; `best`; a checkpoint folder, or a `.ckpt` file of an earlier
        version; the links `last` and `best` in a folder of checkpoints; such a folder or the output_dir of a run, for
        its newest whole one.

    Raises UserError if there is none, or if the one that is named is damaged; it names one that is whole.
    """
    path = Path(folder) / text if text in LINKS else Path(text)
    if path.name == "last" and (path.is_symlink() or not path.is_dir()):
        return _newest(path.parent, text)
    path = standing(_target(path) if path.name == "best" else path)
    if (path / "config.json").is_file():
        raise UserError(f"ckpt_path {text}: a model and no checkpoint; give it as model.model_name_or_path")
    if path.is_file() or is_checkpoint(path):
        return _checked(path)
    if path.is_dir():
        return _newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path, text)
    if text == "best":
        reason = "it was removed, or save_best was not set"
        raise UserError(f"ckpt_path best: none in {path.parent}: {reason}{_otherwise(path.parent)}")
    raise UserError(f"ckpt_path: no such checkpoint: {text}{_otherwise(path.parent)}")


def _newest(folder: Path, text: str) -> Path:
    choice = newest_valid(folder)
    if choice.path is None:
        reasons = "; ".join(choice.passed_over)
        raise UserError(f"ckpt_path {text}: no whole checkpoint in {folder}{f' ({reasons})' if reasons else ''}")
    for line in choice.passed_over:
        logger.warning("passed over: %s; taken instead: %s", line, choice.path)
    return choice.path


def _checked(path: Path) -> Path:
    try:
        verify_checkpoint(path)
    except DamagedCheckpoint as error:
        what = f"{error.file} " if path.is_dir() else "not a checkpoint of radixtrain, or one that "
        raise UserError(f"ckpt_path {path}: {what}{error.reason}{_otherwise(path.parent)}") from error
    return path


def _otherwise(folder: Path) -> str:
    other = newest_valid(folder).path
    return f"; {other} is whole and can be taken" if other else ""


def _target(link: Path) -> Path:
    """Where a link leads that `point` made: a symbolic link, or a file with the name of what is beside it."""
    if link.is_file():
        return link.with_name(link.read_text(encoding="utf-8", errors="replace").strip()[:255] or "nothing")
    return link.parent / link.readlink() if link.is_symlink() else link


def _newest_first(folder: Path) -> list[Path]:
    """Whatever may be a checkpoint, damaged or not. One without a manifest comes first: it may be the newest."""
    files = [path for path in folder.glob("*.ckpt") if path.is_file() and not path.is_symlink()]
    newest = sorted(checkpoints_in(folder), key=lambda path: (*_sequence(path), path.name), reverse=True)
    return newest + sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _sequence(path: Path) -> tuple[float, float]:
    try:
        manifest = Manifest.read(path)
        return manifest.sequence, manifest.step
    except DamagedCheckpoint:
        return math.inf, math.inf
