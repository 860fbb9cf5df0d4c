"""The benchmark that reads a file of chats, on a few short rows: what it draws, prints and refuses."""

import json
from pathlib import Path

import pytest
from tiers import FULL


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
