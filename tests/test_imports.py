"""What an import loads, in fresh processes. Which module may import which is in pyproject.toml, for import-linter."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@cache
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
        ("import radixtrain.__main__", {"torch", "triton", "transformers", "lightning", "numpy", "jsonargparse"}),
    ],
)
def test_import_leaves_out(statement: str, heavy: set[str]) -> None:
    baseline = loaded_by("pass")  # an installed .pth file may import things of its own
    assert not (loaded_by(statement) - baseline) & heavy


def test_public_names_are_found() -> None:
    """And a heavy import is seen, which one of them needs. An unknown name is an AttributeError."""
    statement = "import radixtrain\nfor name in radixtrain.__all__: getattr(radixtrain, name)"
    assert {"torch", "radixtrain"} <= loaded_by(statement)
    loaded_by("import radixtrain\ntry: radixtrain.nothing\nexcept AttributeError: pass")
