"""The report in the terminal: every number is there, nothing is wider than it, and texts are only texts."""

import io
from dataclasses import replace

import pytest

from radixtrain.report.contents import DataReport, TreeNode
from radixtrain.report.terminal import print_report
from radixtrain.screen import screen


def printed(report: DataReport, width: int = 100) -> str:
    file = io.StringIO()
    print_report(report, screen(file=file, width=width, highlight=False))
    return file.getvalue()


def test_the_numbers(report: DataReport) -> None:
    text = " ".join(printed(report, 200).split())
    for expected in (
        "2,014,000 tokens, of which about 504,000 are computed: r = 4.",
        "7, 8 samples",
        "2,014,000, of which 12,345 bear loss",
        "shared prompts 2",
        "min 12, 50 % 60, max 2,310; 37 over max_length 1,024, the longest 2,310",
        "sources a.jsonl: 5, ",
        "16 1,024 4 5 2x 25 min 256 MiB yours",
        "16 4,096 4 5 2x 25 min 1 GiB best",
        "16 4,096 yes 8 9 4x 12 min 30 s 1 GiB",
        "6 x 40 tokens",
        "└── 4 branches",
        "a date: fixing only this saves 4,810,000 computed tokens of an epoch; 9,000,000 once the others here are",
        "fixed. Move it.",
        "train.jsonl:12: ...Today is [2026-11-21]. ",
        "- A batch_size of 64 would give r = 8.",
        "- Estimated from 500 steps.",
        "The best setting, as a command: radixtrain fit",
    ):
        assert expected in text, expected


def test_nothing_predicted_or_found(report: DataReport) -> None:
    own = replace(report.current, speedup=None, seconds_per_epoch=None, memory_bytes=None)
    changed = replace(report, current=own, best=None, settings=(own,), max_length=None, breaks=())
    text = " ".join(printed(changed).split())
    for expected in ("was not predicted", "4 5 - - - yours", "no max_length", "Nothing was found", "To train:"):
        assert expected in text, expected


def test_texts_are_shown_as_they_are(report: DataReport) -> None:
    run = TreeNode(text="You are [bold]a\x1b[2J clerk", num_tokens=400, num_sequences=80)
    text = printed(replace(report, tree=TreeNode(text="", num_tokens=0, num_sequences=80, children=(run,))))
    assert "You are [bold]a\\x1b[2J clerk" in text and "\x1b" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_but_the_command(report: DataReport, width: int) -> None:
    """And a row of the table is one line, also with all figures of split chats."""
    command = "python -m radixtrain fit --config " + "x" * 200
    own = replace(report.current, group_by_prefix=True, whole_r=1.25, r=1250.0, best_r=19.9, seconds_per_epoch=59_460.0)
    split = replace(report, current=own, best=own, settings=(own,))
    assert any("yes 1.25 1,250 19.9 2x 16 h 31 min" in " ".join(x.split()) for x in printed(split, width).splitlines())
    lines = printed(replace(report, command=command, title="t" * 150), width).splitlines()
    assert all(len(line) <= width for line in lines if "x" * 200 not in line)
    assert sum("x" * 200 in line for line in lines) == 1


def test_the_branch_that_saves_most_below_it_comes_first(report: DataReport) -> None:
    long = TreeNode(text="long", num_tokens=300, num_sequences=20)
    wide = TreeNode(text="wide", num_tokens=10, num_sequences=50, children=(replace(long, num_sequences=50),))
    tree = TreeNode(text="", num_tokens=0, num_sequences=70, children=(long, wide))
    lines = printed(replace(report, tree=tree)).splitlines()
    shown = [line for line in lines if " x " in line and " tokens  " in line]
    assert ["wide" in line for line in shown] == [True, False, False] and "20 x 300" in shown[-1]
