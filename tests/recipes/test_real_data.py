"""The benchmark on real rows: which are drawn, what is printed, what is refused."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RADIXTRAIN_DATA", ROOT.parent / "shared" / "data" / "sft"))
FOLDER = ROOT / "recipes" / "benchmarks"
import real_data  # noqa: E402

TINY = ["--layers=1", "--hidden=16", "--head_dim=8", "--repeats=1", "--ordinary_rows", "2", "0"]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """20 rows with one of two system prompts, and answers of 1 to 5 words."""
    file = tmp_path / "chats.jsonl"
    prompts = ("Answer in numbers, as shortly as you can.", "Answer in words, and be as kind as you can be.")
    with file.open("w", encoding="utf-8") as rows:
        for number in range(20):
            turns = (prompts[number % 2], f"What is {number} more than seven?", "seven " * (1 + number % 5))
            roles = ("system", "user", "assistant")
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return file


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_file_is_measured(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(chats), *TINY, "--num_rows=12", "--attention", "cascade", "path", f"--csv={tmp_path / 'a.csv'}"]
    assert real_data.main(flags) == 0
    header, drawn, tried, *table = capsys.readouterr().out.splitlines()
    assert ", medians of 1 alternating runs" in header
    assert drawn.startswith("12 of chats.jsonl: ") and drawn.endswith("radix micro-batches: 1")
    assert "micro-batches of 2 rows" in tried and "12 rows" in tried
    assert [row.split()[1:8] for row in table[2:]] == [
        ["12", "of", "chats.jsonl", "data", "step", arm, drawn.split()[5]] for arm in ("cascade", "path")
    ]
    first, second = rows_of(tmp_path / "a.csv")
    assert first["num_tokens"] == second["num_tokens"] and first["num_sequences"] == "12"
    assert float(first["r"]) > 1.2 and float(first["error"]) < 1e-5
    assert str(tmp_path) not in (tmp_path / "a.csv").read_text()


def test_the_seed_decides_which_rows(chats: Path, tmp_path: Path) -> None:
    sizes = []
    for seed in (0, 0, 1):
        assert real_data.main([str(chats), *TINY, "--num_rows=5", f"--seed={seed}", f"--csv={tmp_path / 'a.csv'}"]) == 0
        sizes.append(rows_of(tmp_path / "a.csv")[0]["num_tokens"])
    assert sizes[0] == sizes[1] != sizes[2]


def test_a_small_budget_makes_several_micro_batches(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real_data.main([str(chats), *TINY, "--max_tokens=200"]) == 0
    assert int(capsys.readouterr().out.partition("radix micro-batches: ")[2].split()[0]) > 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nope.jsonl"], "no such file: nope.jsonl"),
        (["{chats}", "--num_rows=0"], "num_rows must be at least 1, got 0"),
        (["{chats}", "--repeats=0"], "repeats must be above 0, got 0"),
        (["{chats}", "--ordinary_rows", "-1"], "ordinary_rows must be at least 0, got -1"),
        (["{chats}", "--dtype=float16"], "dtype must be one of float32, bfloat16, got float16"),
        (["{chats}", "--attention", "ring"], "ring"),
        (["{chats}", "--csv=nowhere/a.csv"], "csv: no such folder: nowhere"),
        (["{plain}"], "plain.jsonl:1: a tokenizer is learnt from messages, and there are none; give --tokenizer"),
    ],
)
def test_bad_input(
    flags: list[str], message: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"text": "hello"}\n')
    file, *rest = (flag.format(chats=chats, plain=plain) for flag in flags)
    assert real_data.main([file, *TINY, *rest]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error


@pytest.mark.data
@pytest.mark.parametrize(("name", "lowest_r"), [("banking77_train", 4.0), ("gsm8k_many_prompts_train", 1.1)])
def test_the_data_sets(name: str, lowest_r: float, tmp_path: Path) -> None:
    source = DATA / f"{name}.jsonl"
    if not source.is_file():
        pytest.skip(f"RADIXTRAIN_DATA names no folder with {source.name}")
    file = tmp_path / source.name
    with source.open(encoding="utf-8") as rows:
        file.write_text("".join(next(rows) for _ in range(100)), encoding="utf-8")
    flags: list[Any] = [file, *TINY, "--num_rows=8", f"--csv={tmp_path / 'a.csv'}"]
    assert real_data.main(list(map(str, flags))) == 0
    (row,) = rows_of(tmp_path / "a.csv")
    assert float(row["r"]) > lowest_r and float(row["error"]) < 1e-5
