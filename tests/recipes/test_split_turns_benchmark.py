"""The benchmark of split turns: what it generates is what its page says, and every arm runs."""

from pathlib import Path

import pytest

from radixtrain.data.chat import ChatEncoder
from radixtrain.report.turns import split_cost

pytest.importorskip("trl", reason="carries a copy of Qwen3's stock chat template: pip install trl")

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
import split_turns as benchmark  # noqa: E402


def test_the_counts_are_those_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--questions", "1", "3", "--conversations", "2", "--repeats", "0", "--hidden", "64"]) == 0
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    rows = {questions: list(benchmark.conversations(2, questions)) for questions in (1, 3)}
    encoder = ChatEncoder(benchmark.learnt_tokenizer(rows[3]))
    for questions, (whole, split) in zip((1, 3), (table[:2], table[2:]), strict=True):
        cost = split_cost(encoder, rows[questions], batch_size=2)
        assert cost is not None and cost.rewrites_history == (questions > 1)
        assert cost.num_samples == 2 * questions * (benchmark.CALLS + 1)
        assert whole[2:5] == ["2", f"{cost.whole_tokens:,}", f"{cost.whole_unique:,}"]
        assert split[2:5] == [f"{cost.num_samples}", f"{cost.split_tokens:,}", f"{cost.split_unique:,}"]
        # Each exchange is computed with its thinking, and once more without it as the history of later ones.
        assert cost.split_unique < 2.5 * cost.whole_unique < cost.split_tokens


def test_every_arm_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("SYSTEM", "THINKING", "ANSWER", "RESULT", "QUESTION", "NUM_TOOLS"):
        monkeypatch.setattr(benchmark, name, 2)
    given = ["--questions", "1", "--conversations", "1", "--repeats", "1", "--hidden", "64", "--layers", "1"]
    assert benchmark.main(given) == 0
    printed = capsys.readouterr().out
    assert [f"| 1 | {arm} | " in printed for arm in benchmark.ARMS] == [True] * 3
    assert "| split, ordinary | 4 | " in printed
