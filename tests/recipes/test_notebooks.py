"""The notebooks of recipes/notebooks run from the first cell to the last, as in Jupyter, and show what they say."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import FULL

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "notebooks"


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the cells print, run one after the other in a process that starts in the notebook's folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebooks write their demo
    code = "\n\n".join("".join(cell["source"]) for cell in cells(name))
    command = [sys.executable, "-c", "import sys; exec(compile(sys.stdin.read(), 'notebook', 'exec'))"]
    done = subprocess.run(command, input=code, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_sft(said: str) -> None:
    """The cells themselves assert that the gradients are equal."""
    losses = [[float(loss) for loss in pair] for pair in re.findall(r"step \d: loss (\S+) and (\S+)", said)]
    assert len(losses) == 6 and all(last < first for first, last in zip(losses[0], losses[-1], strict=True))
    assert float(re.findall(r"unique: r = (\S+)", said)[0]) > 5 and re.search(r"float64 .* equal", said)


def check_grpo(said: str) -> None:
    assert len(re.findall(r"reward \S+ and \S+, grad_norm", said)) == 3
    assert float(re.findall(r"3 calls shared: .*, r = ([\d.]+);", said)[0]) > 4
    assert "of generation" in said


def check_report(said: str) -> None:
    first, last = said.split("\nTo train:\n")[:2]
    ratios = [float(re.findall(r"computed:\s+r = ([\d.]+)\.", part)[0]) for part in (first, last)]
    assert ratios[0] < 1.1 and ratios[1] > 5
    assert "Nothing was found that breaks sharing" in last and "Nothing was found" not in first
    assert "a date or time" in first


CHECKS = {"grpo": check_grpo, "report": check_report, "sft": check_sft}


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_stored(name: str) -> None:
    """By `recipes/notebooks/run.py`: with no path of the machine on which it ran."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(CHECKS)
    stored = "".join(line for cell in cells(name) for output in cell["outputs"] for line in output["text"])
    CHECKS[name](stored)
    assert str(FOLDER.anchor) + "tmp" not in stored and cells(name)[0]["execution_count"] == 1


@FULL
@pytest.mark.parametrize("name", CHECKS)
def test_what_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHECKS[name](printed(name, tmp_path, monkeypatch))
