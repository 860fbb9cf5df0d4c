"""The benchmark of the report's predictions: its generated set, and what it reads from what the commands print."""

import argparse
import json
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recipe() -> Any:
    import report_accuracy

    return report_accuracy


def test_three_levels_of_sharing(recipe: ModuleType) -> None:
    rows = recipe.nested_chats(departments=2, documents=3, questions=4)
    systems = [row["messages"][0]["content"].split("\n\n") for row in rows]
    assert len(rows) == 24 and [len({tuple(s[:n]) for s in systems}) for n in (1, 2, 3)] == [1, 2, 6]
    assert rows == recipe.nested_chats(departments=2, documents=3, questions=4)


def test_a_run(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are replaced: what they would print and log is read."""
    called = []

    def run(command: str, flags: dict[str, Any], options: argparse.Namespace) -> str:
        called.append((command, flags.get("dedup")))
        if command == "fit":
            rates = [999, 999, 999, 300, 320, 310] if flags["dedup"] == "true" else [999, 999, 999, 100, 101, 99]
            folder = Path(flags["output_dir"]) / "logs" / "version_0"
            folder.mkdir(parents=True)
            lines = "".join(f"1.0,2.5,{rate}\n" for rate in rates)
            (folder / "metrics.csv").write_text(f"loss,r,tokens_per_second\n{lines}")
        return "A training step is predicted to run\nat 3.41x the speed"

    monkeypatch.setattr(recipe, "run", run)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in islice(recipe.nested_chats(2, 2, 2), 4)))
    options = argparse.Namespace(output_dir=tmp_path / "out", layers=1, hidden=64, batch_size=4, steps=[6, 6])
    found = recipe.measured(path, options)
    assert found == ("chats", 2.5, 3.41, 3.1) and found.error == pytest.approx(0.1)
    assert called == [("report", None), ("fit", "true"), ("fit", "false")]
    assert (tmp_path / "out" / "chats-1x64" / "start" / "config.json").is_file()
