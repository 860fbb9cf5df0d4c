"""The benchmarks that read a file of chats, each on a few short rows: their figures by hand, and what they print."""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import on_ranks
from tiers import FULL

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RADIXTRAIN_DATA", ROOT.parent / "shared" / "data" / "sft"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """40 rows with one of five system prompts, and answers of 1 to 5 words."""
    file = tmp_path / "chats.jsonl"
    with file.open("w", encoding="utf-8") as rows:
        for number in range(40):
            system = f"Prompt {'abcde'[number % 5] * 3}: answer in numbers, as shortly as you can, and never in words."
            turns = (system, f"What is {number} more than seven?", "seven " * (1 + number % 5))
            roles = ("system", "user", "assistant")
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return file


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class TestRealRows:
    """real_data.py: which rows are drawn, what is printed, what is refused."""

    TINY = ("--layers=1", "--hidden=16", "--head_dim=8", "--repeats=1", "--ordinary_rows", "2", "0")

    @FULL
    def test_a_file_is_measured(self, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """It checks the gradients of every arm before it times them."""
        import real_data

        arms = ("cascade", "path")
        flags = [str(chats), *self.TINY, "--num_rows=12", "--attention", *arms]
        assert real_data.main(flags) == 0
        header, drawn, tried, *table = capsys.readouterr().out.splitlines()
        assert ", medians of 1 alternating runs" in header
        assert drawn.startswith("1x16, 12 of chats.jsonl: ") and drawn.endswith("radix micro-batches: 1")
        assert "micro-batches of 2 rows" in tried and "12 rows" in tried
        for row, arm in zip(table[3:], arms, strict=True):
            name, attention, unique, r, *_ = (cell.strip() for cell in row.strip("|").split("|"))
            assert (name, attention, unique) == ("1x16, 12 of chats.jsonl, step", arm, drawn.split()[6])
            assert float(r) > 1.2

    def test_bad_input(self, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        import real_data

        plain = tmp_path / "plain.jsonl"
        plain.write_text('{"text": "hello"}\n')
        for flags, message in {
            ("nope.jsonl",): "no such file: nope.jsonl",
            (plain,): "plain.jsonl:1: a tokenizer is learnt from messages, and there are none; give --tokenizer",
        }.items():
            file, *rest = map(str, flags)
            assert real_data.main([file, *self.TINY, *rest]) == 1
            (error,) = capsys.readouterr().err.splitlines()
            assert error.startswith("error: ") and message in error


class TestGroupByPrefix:
    """group_by_prefix.py: every run has the same rows, and the table says what was measured."""

    @FULL
    def test_the_table(self, chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.syspath_prepend(ROOT / "recipes" / "benchmarks")  # a recipe has this name, too
        monkeypatch.delitem(sys.modules, "group_by_prefix", raising=False)
        import group_by_prefix as benchmark

        flags = ["--together", "1", "4", "--seeds", "3", "--epochs", "2", "--batch_size", "4"]
        benchmark.main([str(chats), *flags])
        first, _, _, *lines = capsys.readouterr().out.splitlines()
        assert first == "36 rows in 5 groups, 4 held out; steps of 4"
        assert lines[-2] == "1 together: noise of the gradient 1.00"
        table = [[float(cell) for cell in line.split("|")[1:7]] for line in lines[:-2]]
        steps = [(together, 3, step) for together in (1, 4) for step in (4, 9, 14, 18)]
        assert [tuple(row[:3]) for row in table] == steps
        plain, grouped = table[3], table[7]
        assert grouped[5] > 1.2 * plain[5] and max(plain[3], grouped[3]) < table[0][3]


class TestRanks:
    """ranks.py: steps that are divided among ranks."""

    def test_a_step_on_two_ranks(self) -> None:
        """7 8 is computed on both; one micro-batch of a rank, and two of the other with a budget of 3."""
        import ranks as benchmark

        sequences = [np.array(ids) for ids in ([7, 8, 1], [7, 8, 2], [7, 8, 3])]
        step = benchmark.divided(sequences, 2, 100)
        assert (sorted(step.costs), step.rows, step.num_weightless) == ([3, 4], 7, 0)
        assert step.imbalance == pytest.approx(4 / 3.5)
        step = benchmark.divided(sequences, 2, 3)
        assert (sorted(step.costs), step.rows, step.num_weightless) == ([3, 6], 9 + 2, 1)

    def test_a_step_that_is_split(self) -> None:
        """Five rows on two ranks; with a budget of 2 rows a rank, micro-batches of 4 and 3."""
        import ranks as benchmark

        sequences = [np.array(ids) for ids in ([7, 8, 1], [7, 8, 2], [7, 8, 3])]
        assert benchmark.split_rows(sequences, 2, 100) == [3, 2]
        assert benchmark.split_rows(sequences, 2, 2) == [2 + 2, 2 + 1]
        assert sorted(benchmark.data_parallel_rows(sequences, 2, 100)) == [3, 4]

    @FULL
    @pytest.mark.data
    @pytest.mark.parametrize("name", ["banking77", "gsm8k_many_prompts"])
    def test_the_split_keeps_r(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        """That of one process to 1 %, however many ranks, with equal parts."""
        import ranks as benchmark

        file = DATA / f"{name}_train.jsonl"
        if not file.is_file():
            pytest.skip(f"RADIXTRAIN_DATA names no folder with {file.name}")
        benchmark.main([str(file), "--split", "--batch_size", "32", "128", "--num_ranks", "2", "8"])
        rows = [[float(cell) for cell in line.split("|")[4:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
        assert len(rows) == 4
        for *_, over_one, worst in rows:
            assert over_one >= 0.99 and worst <= 1.01

    @FULL
    def test_a_run(self, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
        import ranks as benchmark

        benchmark.main([str(chats), "--batch_size", "20", "--num_ranks", "1", "2", "--max_tokens", "4096"])
        rows = capsys.readouterr().out.splitlines()[2:]
        one, two = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
        assert one[:5] == ["chats", "20", "1", "2", "1.000"] and one[6:9] == ["1.000", "1.00x", "0.0"]
        assert two[:4] == ["chats", "20", "2", "2"]
        assert 1 <= float(two[4]) < 1.2
        assert 0.9 < float(two[6]) <= 1, "a prompt for each rank"
        assert float(two[5]) == pytest.approx(float(one[5]) * float(two[6]), rel=2e-2)
        assert 1.5 < float(two[7][:-1]) <= 2
        benchmark.main([str(chats), "--batch_size", "10", "--num_ranks", "2", "--per_rank"])
        (row,) = capsys.readouterr().out.splitlines()[2:]
        assert [cell.strip() for cell in row.split("|")[2:5]] == ["20", "2", "2"]


@FULL
class TestSplitBatch:
    """split_batch.py: what it prints of a split step, whose gradients it compares before it takes a time."""

    TINY = ("--layers=1", "--hidden=32", "--length=200", "--repeats=1")

    @pytest.fixture
    def lines(self, capfd: pytest.CaptureFixture[str]) -> Any:
        def run(ranks: int, *flags: str) -> list[list[str]]:
            import split_batch as benchmark

            on_ranks(ranks, lambda rank: benchmark.main([*flags, *self.TINY]), has_group=False)
            text = [line for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]
            return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[1:]]

        return run

    def test_time(self, chats: Path, lines: Any) -> None:
        of_chats, _, of_tree, _ = lines(2, "time", f"--file={chats}")
        assert of_chats[:2] == ["32 of chats", "of the wall"] and of_tree[5] == "0.50"
        assert 0.5 < float(of_tree[3]) < 1, "each rank of data parallel computes the prompt"

    def test_memory(self, lines: Any) -> None:
        rows = lines(2, "memory")
        assert [row[:2] for row in rows] == [["200 tokens, 200 trained", "1"], ["200 tokens, 200 trained", "2"]] * 2
        assert float(rows[1][3]) < 0.95 and float(rows[3][3]) < 0.95, rows
