"""What importing costs, in fresh processes, and which room may know which."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. A module imports from its own floor and those below; the kernels know nothing of radixtrain.
FLOORS = [
    ["kernels", "loss", "errors"],
    ["tree"],
    ["attention", "collators"],
    ["hf", "data"],
    ["verification"],
    ["bench", "training", "testing"],
    ["commands"],
    ["__main__"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh process after `statement`."""
    code = (
        f"{statement}\nimport json, sys; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import radixtrain", {"torch", "triton", "transformers", "lightning", "numpy"}),
        ("import radixtrain.tree.plan", {"torch", "triton", "transformers", "lightning"}),
        ("import radixtrain.errors", {"torch", "triton", "transformers", "lightning", "numpy"}),
        ("import radixtrain.attention", {"transformers", "lightning", "triton"}),
    ],
)
def test_import_leaves_out(statement: str, heavy: set[str]) -> None:
    baseline = loaded_by("pass")  # an installed .pth file may import things of its own
    assert not (loaded_by(statement) - baseline) & heavy


def test_probe_sees_a_heavy_import() -> None:
    assert {"torch", "radixtrain"} <= loaded_by("import radixtrain, torch")


def test_public_names_are_found() -> None:
    loaded_by("import radixtrain\nfor name in radixtrain.__all__: getattr(radixtrain, name)")


def test_unknown_name_is_an_attribute_error() -> None:
    loaded_by("import radixtrain\ntry: radixtrain.nothing\nexcept AttributeError: pass")


def source_files() -> list[Path]:
    """Every module once, under its real path."""
    folders = [ROOT / "radixtrain", ROOT / "kernels", ROOT / "collators"]
    own = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted({path for path in own if path.resolve() == path})


def imported_rooms(path: Path) -> Iterator[str]:
    """The rooms of radixtrain that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("radixtrain."))


def test_every_arrow_points_down() -> None:
    upward = []
    for path in source_files():
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "radixtrain"]
        floor = FLOOR_OF.get(parts[0])
        if floor is not None:
            rooms = sorted({room for room in imported_rooms(path) if FLOOR_OF.get(room, -1) > floor})
            upward += [f"{path.relative_to(ROOT)} imports radixtrain.{room}" for room in rooms]
    assert not upward, "\n".join(upward)
