"""The benchmark of steps that are divided among ranks: its figures by hand, and that a run says all of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from radixtrain.collators.ranks import SequenceCost

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
import ranks as benchmark  # noqa: E402


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """48 rows after one of two system prompts."""
    file = tmp_path / "chats.jsonl"
    with file.open("w", encoding="utf-8") as rows:
        for number in range(48):
            system = (
                f"Prompt {'ab'[number % 2] * 9}: answer in numbers, as shortly as you can, and never in words. " * 3
            )
            turns = (system, f"What is {number} more than seven?", f"{number + 7}")
            roles = ("system", "user", "assistant")
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return file


def test_a_step_on_two_ranks() -> None:
    """7 8 is computed on both; one micro-batch of a rank, and two of the other with a budget of 3."""
    sequences = [np.array(ids) for ids in ([7, 8, 1], [7, 8, 2], [7, 8, 3])]
    step = benchmark.divided(sequences, 2, 100, SequenceCost(row=1, pair=0))
    assert (sorted(step.costs), step.rows, step.num_weightless) == ([3, 4], 7, 0)
    assert step.imbalance == pytest.approx(4 / 3.5)
    step = benchmark.divided(sequences, 2, 3, SequenceCost(row=1, pair=0))
    assert (sorted(step.costs), step.rows, step.num_weightless) == ([3, 6], 9 + 2, 1)


def test_a_run(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main([str(chats), "--batch_size", "16", "--num_ranks", "1", "2", "--max_tokens", "4096"])
    _, _, one, two = ([cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines())
    assert one[:5] == ["chats", "16", "1", "3", "1.000"] and one[6:9] == ["1.000", "1.00x", "0.0"]
    assert two[:4] == ["chats", "16", "2", "3"]
    assert 1 <= float(two[4]) < 1.1
    assert 0.9 < float(two[6]) <= 1, "a prompt for each rank"
    assert float(two[5]) == pytest.approx(float(one[5]) * float(two[6]), rel=2e-2)
    assert 1.5 < float(two[7][:-1]) <= 2


def test_conversations_for_each_rank(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main([str(chats), "--batch_size", "16", "--num_ranks", "3", "--per_rank"])
    (row,) = capsys.readouterr().out.splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["48", "3", "1"]
