"""Names that a release of transformers has changed stand in one file."""

import ast
from pathlib import Path

from radixtrain.hf.backbone import CACHE, IMAGE_TOKEN, START_CHECKPOINTING, STOP_CHECKPOINTING

SOURCE = Path(__file__).resolve().parents[3] / "radixtrain"
OLDER = {name for names in (CACHE, IMAGE_TOKEN, START_CHECKPOINTING, STOP_CHECKPOINTING) for name in names[1:]}
WITH_THEM = {"hf/backbone.py"}


def test_each_stands_in_one_file() -> None:
    files = [path for folder in (SOURCE, SOURCE / "kernels", SOURCE / "collators") for path in folder.rglob("*.py")]
    having = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else None
            if name in OLDER or (isinstance(node, ast.Constant) and node.value in OLDER):
                having.add(path.relative_to(SOURCE).as_posix())
    assert having == WITH_THEM
