"""What the tests of this folder share: a server that runs are forked from, a model whose checkpoints take time."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked import Run, Server

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Callable[..., Run]:
    """`start(arguments)`: the run of a command line, without a picture.

    Its temporary files go to `tmp_path / "temporary"`.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    count = 0

    def run(arguments: list[str], environment: dict[str, str] | None = None, **options: Any) -> Run:
        nonlocal count
        count += 1
        variables = {"TMPDIR": str(temporary), **(environment or {})}
        return server.start(arguments, tmp_path / f"stderr_{count}", variables, **{"draws": False, **options})

    return run


@pytest.fixture(scope="session")
def heavy_model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.7 million parameters, 20 MB in a checkpoint, with the tokenizer of the shop."""
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        import tiny
    finally:
        sys.path.remove(str(ROOT / "recipes"))
    folder = tmp_path_factory.mktemp("heavy") / "model"
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    tiny.tiny_qwen3(tokenizer, layers=2, hidden=256, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
