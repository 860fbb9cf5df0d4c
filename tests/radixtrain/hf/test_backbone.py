"""Names that a release of transformers has changed stand in one file."""

import re
from pathlib import Path

from radixtrain.hf.backbone import CACHE, IMAGE_TOKEN, START_CHECKPOINTING, STOP_CHECKPOINTING

SOURCE = Path(__file__).resolve().parents[3] / "radixtrain"
OLDER = {name for names in (CACHE, IMAGE_TOKEN, START_CHECKPOINTING, STOP_CHECKPOINTING) for name in names[1:]}
WITH_THEM = {"hf/backbone.py"}


def test_each_stands_in_one_file() -> None:
    """As an attribute, an argument or a text."""
    files = [path for folder in (SOURCE, SOURCE / "kernels", SOURCE / "collators") for path in folder.rglob("*.py")]
    name = re.compile(rf"""[."']({"|".join(OLDER)})\b|\b({"|".join(OLDER)})=""")
    having = {path.relative_to(SOURCE).as_posix() for path in files if name.search(path.read_text(encoding="utf-8"))}
    assert having == WITH_THEM
