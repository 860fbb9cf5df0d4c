"""The drop-in recipes run on the demo in miniature, and the loss falls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    run("recipes/demo.py", f"--output_dir={folder}")
    return folder


def run(recipe: str, *flags: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, recipe, *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def falls(losses: list[str]) -> bool:
    return float(losses[-1]) < 0.6 * float(losses[0])


def test_plain_loop(demo):
    printed = run(
        "recipes/plain_loop.py", f"--model={demo / 'model'}", f"--train_file={demo / 'train.jsonl'}", "--max_steps=21"
    )
    assert falls(re.findall(r"loss ([\d.]+)", printed))


def test_hf_trainer(demo, tmp_path):
    flags = [
        f"--model={demo / 'model'}",
        f"--train_file={demo / 'train.jsonl'}",
        f"--output_dir={tmp_path}",
        "--max_steps=30",
    ]
    printed = run("recipes/hf_trainer.py", *flags)
    assert falls(re.findall(r"'loss': '?([\d.]+)", printed))
    assert (tmp_path / "model.safetensors").is_file()
