"""The benchmark of `group_by_prefix`: every run has the same rows, and the table says what was measured."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
import group_by_prefix as benchmark  # noqa: E402


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """40 rows with one of five system prompts."""
    file = tmp_path / "chats.jsonl"
    with file.open("w", encoding="utf-8") as rows:
        for number in range(40):
            system = f"Prompt {'abcde'[number % 5] * 3}: answer in numbers, as shortly as you can, and never in words."
            turns = (system, f"What is {number} more than seven?", f"{number + 7}")
            roles = ("system", "user", "assistant")
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return file


def test_the_table(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--together", "1", "4", "--seeds", "3", "--epochs", "2", "--batch_size", "4"]
    benchmark.main([str(chats), *flags, "--csv", str(tmp_path / "curves.csv")])
    first, _, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "36 rows in 5 groups, 4 held out; steps of 4"
    assert lines[-2] == "1 together: noise of the gradient 1.00"
    with (tmp_path / "curves.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [(row["together"], row["seed"], row["step"]) for row in table] == [
        (together, "3", step) for together in ("1", "4") for step in ("4", "9", "14", "18")
    ]
    plain, grouped = table[3], table[7]
    assert float(grouped["r"]) > 1.2 * float(plain["r"])
    assert all(float(line["train_loss"]) < float(table[0]["train_loss"]) for line in (plain, grouped))


def test_the_noise_is_the_variance_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gradients = nn.Linear(2, 1, bias=False), iter([[1.0, 2.0], [3.0, 2.0], [2.0, 5.0]])

    def backward(model: nn.Module, step: object) -> float:
        model.weight.grad = torch.tensor([next(gradients)])
        return 0.0

    monkeypatch.setattr(benchmark, "backward", backward)
    monkeypatch.setattr(benchmark, "steps_of", lambda *_: range(3))
    options = benchmark.parse(["rows.jsonl"])
    assert benchmark.noise(model, [], None, options) == pytest.approx(2 / 3 + 2)
