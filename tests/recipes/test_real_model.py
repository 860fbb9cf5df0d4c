"""The recipe of a real run: on a random model and rows of its own, and where there is one, on the real model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import FULL

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RADIXTRAIN_DATA", ROOT.parent / "shared" / "data" / "sft"))
MODEL = ROOT / "runs" / "real" / "smollm2"

pytestmark = FULL


def printed(*flags: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "recipes/real_model.py", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_part_on_a_random_model(tmp_path: Path) -> None:
    """Both arms are the same but for rounding; a second call runs nothing again."""
    found = printed("--tiny", "--output_dir", tmp_path, "--modes", "LoRA, float32")
    assert re.findall(r"^## (\w+)", found, re.MULTILINE) == ["fit", "accuracy", "answers", "trl"]
    # Losses, norms and metrics are of order one: rounding moves them by millionths, a wrong gradient by far more.
    [off] = re.findall(r"LoRA, float32, radixtrain \|.* \| (\S+) \| (\S+) \|", found)
    worst = re.findall(r"^\| (?:SFT|DPO|GRPO) \|.* \| (\S+) \(", found, re.MULTILINE)
    assert len(worst) == 3 and max(map(float, [*off, *worst])) < 1e-3
    assert found.count("| 4 of 4 |") == 2, "the answers of model.generate"
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("losses", "memory"))
    runs = tmp_path / "runs.json"
    assert all(run["seconds"] > 0 and run["peak_bytes"] > 2**28 for run in json.loads(runs.read_text()).values())
    assert found.endswith(printed("--tiny", "--output_dir", tmp_path, "--modes", "LoRA, float32"))


@pytest.mark.data
def test_answers_of_the_real_model(tmp_path: Path) -> None:
    """Before training and after a step, each equal to that of `model.generate`."""
    for path in (MODEL, DATA / "banking77_test.jsonl"):
        if not path.exists():
            pytest.skip(f"there is no {path.name}: runs/real/smollm2 and RADIXTRAIN_DATA hold the real model and rows")
    sizes = ("--accuracy_steps", 1, "--num_tests", 8)
    found = printed("--data_dir", DATA, "--model", MODEL, "--output_dir", tmp_path, "--parts", "answers", *sizes)
    assert found.count("| 8 of 8 |") == 2, found
