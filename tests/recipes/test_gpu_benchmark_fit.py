"""The real run of the GPU's benchmark, with a tiny shape and three steps on a CPU."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
import gpu_fit  # noqa: E402

SYSTEM = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two, paper on shelf three. "


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """24 rows after one system prompt."""
    file = tmp_path / "chats.jsonl"
    with file.open("w", encoding="utf-8") as rows:
        for number in range(24):
            turns = ("system", SYSTEM * 4), ("user", f"Where is thing {number}?"), ("assistant", f"Shelf {number % 3}.")
            messages = [{"role": role, "content": content} for role, content in turns]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.mark.full
def test_both_runs_have_the_same_losses(chats: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    flags = ["--train_file", str(chats), "--output_dir", str(folder), "--tiny", "--max_steps", "3", "--batch_size", "8"]
    command = [sys.executable, str(FOLDER / "gpu_fit.py"), *flags, "--precision", "32-true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with (folder / "losses.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["dedup"], row["step"]) for row in rows] == [
        (name, str(n)) for name in ("on", "off") for n in (1, 2, 3)
    ]
    on, off = ([float(row["loss"]) for row in rows if row["dedup"] == name] for name in ("on", "off"))
    assert on == pytest.approx(off, abs=1e-5) and on[2] < on[0]
    assert float(rows[0]["r"]) > 3
    page = (folder / "gpu_fit.md").read_text(encoding="utf-8")
    assert "| | dedup on | dedup off |" in page and "A step with deduplication is" in page
    assert str(tmp_path) not in page, "no paths of this machine"
    assert (folder / "losses.png").stat().st_size > 1000
    assert not [*folder.glob("dedup-*/model"), *folder.glob("dedup-*/checkpoints")], "gigabytes are not kept"


def arm(losses: list[float], rate: float) -> gpu_fit.Arm:
    steps = {"loss": losses, "r": [15.0] * len(losses), "tokens_per_second": [rate] * len(losses)}
    return gpu_fit.Arm(60.0, steps)


def test_the_table_of_two_runs() -> None:
    lines = gpu_fit.table({"on": arm([8.0, 4.0], 3e5), "off": arm([8.0, 4.002], 1e5)})
    assert "| tokens/s, median | 300,000 | 100,000 |" in lines
    assert "| loss, mean of the last 10 steps | 6.0000 | 6.0010 |" in lines
    assert lines[-1] == (
        "A step with deduplication is 3.0x as fast, the median of 2. The losses of a step differ by 1.0e-03 in the "
        "median, by 2.0e-03 at most."
    )


def test_the_table_of_one_run() -> None:
    lines = gpu_fit.table({"on": arm([8.0, 4.0], 3e5)})
    assert lines[0] == "| | dedup on |" and lines[-1] == "The other run is not done."


def test_a_run_that_fails_leaves_the_other(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(options: object, start: Path, output_dir: Path, dedup: bool) -> gpu_fit.Arm:
        if dedup:
            raise subprocess.CalledProcessError(1, "fit")
        return arm([8.0], 1e5)

    monkeypatch.setattr(gpu_fit, "fit", fit)
    assert gpu_fit.main(["--train_file", str(chats), "--output_dir", str(tmp_path / "out"), "--tiny"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: dedup on: fit ended with exit code 1"
    assert "| | dedup off |" in (tmp_path / "out" / "gpu_fit.md").read_text(encoding="utf-8")


def test_without_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_fit.main(["--train_file", str(tmp_path / "absent.jsonl")]) == 1
    assert capsys.readouterr().err == f"error: --train_file: no such file: {tmp_path / 'absent.jsonl'}\n"
