"""The benchmark of generation: its arms give the same answers, its ideal is counted right, and each part runs."""

import csv

import generation as benchmark
import generation_arms as arms
import pytest
from tiers import FULL, cases

SMALL = ["--layers=1", "--hidden=64", "--max_new_tokens=3", "--repeats=2", "--batch_sizes", "2", "4"]
COMMON = [3, 11, 4, 14, 5, 9, 2, 6]
PROMPTS = [[*COMMON, 7, 8], [*COMMON, 7], COMMON, [*COMMON, 20, 21, 22], [40, 41]]
ROUNDING = 1e-4  # a gap of two logits of order one below which float32 may choose either; rounding moves it by 1e-6


@pytest.fixture
def model(tiny_qwen3):
    return tiny_qwen3().eval()


@pytest.mark.parametrize("arm", cases(["padded 1", "padded 8", "blocks 4", "blocks 256"], ["padded 8"]))
def test_arms_agree(model, arm):
    kind, size = arm.split()
    answers = arms.radix(model, PROMPTS, 6)
    model.generation_config.eos_token_id = answers[0][2]
    answers = arms.radix(model, PROMPTS, 6)
    assert len(answers[0]) <= 3 and max(map(len, answers)) == 6, "one answer ends early"
    found = arms.agreement(model, PROMPTS, answers, getattr(arms, kind)(int(size))(model, PROMPTS, 6))
    assert found.largest_gap <= ROUNDING, found


def test_ideal_counts_what_each_arm_computes(model):
    """Two prompts of 3 tokens that share 2, answers of 3 and 2 tokens: rows of 5 and 4, of which 2 are shared."""
    found = arms.ideal_of(model.config, [[1, 2, 3], [1, 2, 4]], [[7, 7, 7], [7, 7]])
    assert found.r == 9 / 7
    assert (found.ordinary.linear / 9, found.ordinary.head / 5) == (found.radix.linear / 7, found.radix.head / 5)
    pairs = 15 + 10, (1 + 2) + (3 + 4 + 5) + (3 + 4)
    assert found.ordinary.attention / pairs[0] == found.radix.attention / pairs[1] > 0
    assert found.speedup == found.ordinary.total / found.radix.total


@FULL
@pytest.mark.parametrize("part", ["grid", "apart"])
def test_random_prompts(part, tmp_path, capsys):
    flags = ["--batches", "1", "4", "--own", "8", *(["--shared", "0", "32"] if part == "grid" else [])]
    assert benchmark.main([part, *flags, *SMALL, "--most_tokens=90", f"--csv={tmp_path / 'found.csv'}"]) == 0
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert [row["work"] for row in rows] == [
        f"{number} x ({shared} + 8)" for shared in ((0, 32) if part == "grid" else (0,)) for number in (1, 4)
    ]
    assert all(float(row["largest_gap"]) <= ROUNDING and float(row["speedup"]) > 0 and row["torch"] for row in rows)
    assert float(rows[0]["ideal"]) == float(rows[1]["ideal"]) == 1.0, "nothing is shared"
    if part == "grid":
        assert float(rows[3]["ideal"]) > 1.5
        assert rows[3]["prompts_timed"] == str(90 // (32 + 8 + 3))
    assert capsys.readouterr().out.count("| generate, batches of ") == len(rows)


@FULL
def test_real_rows(shop, tmp_path, capsys):
    flags = [f"--model={shop / 'model'}", f"--file={shop / 'validation.jsonl'}", "--block_prompts=2", "--page_size=16"]
    assert benchmark.main(["real", *flags, *SMALL, f"--csv={tmp_path / 'found.csv'}"]) == 0
    padded, blocks = csv.DictReader((tmp_path / "found.csv").open())
    assert (padded["arm"], padded["prompts_timed"], padded["batch_size"] in "24") == ("generate", "5", True)
    assert (blocks["arm"], blocks["prompts_timed"], blocks["page_size"]) == ("generate_batch", "2", "16")
    assert max(float(row["largest_gap"]) for row in (padded, blocks)) <= ROUNDING
    assert "exact match: 0.0%" in capsys.readouterr().out


def test_real_without_a_file(capsys):
    assert benchmark.main(["real"]) == 1
    assert "--file" in capsys.readouterr().err
