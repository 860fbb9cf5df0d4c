"""The recipe on real data, cut short: what it prints, and that both arms have the same losses."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers import FULL

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RADIXTRAIN_DATA", ROOT.parent / "shared" / "data" / "sft"))

pytestmark = [pytest.mark.data, FULL]


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 training and 40 test rows, enough for 3 steps."""
    folder = tmp_path_factory.mktemp("banking77")
    for split, count in (("train", 192), ("test", 40)):
        source = DATA / f"banking77_{split}.jsonl"
        if not source.is_file():
            pytest.skip(f"RADIXTRAIN_DATA names no folder with {source.name}")
        with source.open(encoding="utf-8") as rows:
            (folder / source.name).write_text("".join(next(rows) for _ in range(count)), encoding="utf-8")
    return folder


@pytest.fixture
def run(few_rows: Path) -> Callable[..., str]:
    """What the recipe prints, with the runs that it starts."""

    def run_it(*flags: str) -> str:
        command = [
            sys.executable,
            "recipes/banking77.py",
            f"--data_dir={few_rows}",
            f"--output_dir={few_rows / 'runs'}",
        ]
        done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run_it


def test_training_leaves_a_model_and_an_accuracy(run, few_rows):
    printed = run("--max_epochs=2")
    assert re.search(r"exact match before: 0\.0%", printed)
    assert re.search(r"exact match after: \d+\.\d%", printed)
    assert float(re.search(r"^r +([\d.]+) tokens", printed, re.MULTILINE)[1]) > 8
    assert (few_rows / "runs" / "sft" / "model" / "model.safetensors").is_file()


def test_both_arms_have_the_same_losses(run):
    printed = run("--compare=3")
    # The losses are of order one: rounding moves them by a millionth, a wrong gradient by far more than a thousandth.
    assert float(re.search(r"largest difference of the loss in 3 steps: (\S+)", printed)[1]) < 1e-3
    assert re.search(r"is ([\d.]+)x as fast", printed)
