"""The report in the terminal: every number is there, nothing is wider than it, and texts are only texts."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from radixtrain.report.contents import Break, DataReport, Example, Setting, TreeNode
from radixtrain.report.terminal import print_report

OWN = Setting(
    batch_size=32,
    max_tokens=16384,
    group_by_prefix=False,
    r=1.81,
    best_r=1.9,
    speedup=1.7,
    seconds_per_epoch=754.0,
    memory_bytes=3 << 30,
)
LEAF = TreeNode(text="Where is\nmy card?", num_tokens=4, num_sequences=1)
TREE = TreeNode(
    text="",
    num_tokens=0,
    num_sequences=90,
    children=(TreeNode(text="You are [bold]a\x1b[2J clerk", num_tokens=400, num_sequences=80, children=(LEAF,)),),
    num_hidden_children=10,
    num_hidden_sequences=10,
    num_hidden_tokens=99,
)


def report(**changes: Any) -> DataReport:
    options: dict[str, Any] = {
        "title": "chats.jsonl",
        "model": "Qwen/Qwen3-0.6B",
        "num_rows": 90,
        "num_samples": 95,
        "num_tokens": 40_000,
        "num_unique_tokens": 5_000,
        "num_labels": 1_234,
        "num_prompts": 20,
        "length_quantiles": {"min": 12, "50 %": 440, "max": 999},
        "max_length": 4096,
        "num_over_length": 3,
        "longest": 5001,
        "sources": {"a": 50, "b": 40},
        "tree": TREE,
        "current": OWN,
        "settings": (OWN, replace(OWN, batch_size=256, r=6.05)),
        "best": OWN,
        "command": "python -m radixtrain fit --config sft.yaml",
        "breaks": (),
        "environment": {},
    }
    return DataReport(**{**options, **changes})


def printed(found: DataReport, width: int = 100) -> str:
    file = io.StringIO()
    print_report(found, Console(file=file, width=width, highlight=False))
    return file.getvalue()


def test_the_numbers() -> None:
    text = " ".join(printed(report()).split())
    for expected in (
        "40,000 tokens, of which about 22,100 are computed: r = 1.81.",
        "90, 95 samples",
        "40,000, of which 1,234 bear loss",
        "shared prompts 20",
        "min 12, 50 % 440, max 999; 3 over max_length 4,096, the longest 5,001",
        "sources a: 50, b: 40",
        "32 16,384 no 1.81 1.9 1.7x 12 min 34 s 3 GiB yours, best",
        "256 16,384 no 6.05 1.9",
        "80 x 400 tokens",
        "└── 1 branch └── 10 more branches",
        "Nothing was found that breaks sharing.",
        "To train: python -m radixtrain fit --config sft.yaml",
    ):
        assert expected in text


def test_what_is_only_sometimes_there() -> None:
    example = Example(where="chats.jsonl:7", before="Today is ", value="2024-03-01", after=", good")
    cause = Break(
        cause="a date",
        num_sequences=80,
        num_values=60,
        at_token=12,
        tokens_saved=30_000,
        advice="Move it to the end.",
        examples=(example,),
    )
    best = replace(OWN, max_tokens=32768)
    found = report(breaks=(cause,), best=best, hints=("a hint",), notes=("a note",), settings=(OWN, best))
    text = " ".join(printed(found).split())
    for expected in (
        "a date: 30,000 computed tokens of an epoch. Move it to the end.",
        "chats.jsonl:7: ...Today is [2024-03-01], good...",
        "- a hint",
        "- a note",
        "The best setting, as a command:",
    ):
        assert expected in text


def test_nothing_predicted() -> None:
    own = replace(OWN, speedup=None, seconds_per_epoch=None, memory_bytes=None)
    text = " ".join(printed(report(current=own, best=own, settings=(own,), max_length=None)).split())
    assert "was not predicted" in text and "1.81 1.9 - - - yours, best" in text and "no max_length" in text


def test_texts_are_shown_as_they_are() -> None:
    text = printed(report())
    assert "You are [bold]a?[2J clerk" in text and "\x1b" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_but_the_command(width: int) -> None:
    command = "python -m radixtrain fit --config " + "x" * 200
    lines = printed(report(command=command, title="t" * 150), width).splitlines()
    assert all(len(line) <= width for line in lines if "x" * 200 not in line)
    assert sum("x" * 200 in line for line in lines) == 1


def test_the_branch_that_saves_most_below_it_comes_first() -> None:
    long = TreeNode(text="long", num_tokens=300, num_sequences=20)
    wide = TreeNode(text="wide", num_tokens=10, num_sequences=50, children=(replace(long, num_sequences=50),))
    lines = printed(report(tree=TreeNode(text="", num_tokens=0, num_sequences=70, children=(long, wide)))).splitlines()
    shown = [line for line in lines if " x " in line and " tokens  " in line]
    assert ["wide" in line for line in shown] == [True, False, False] and "20 x 300" in shown[-1]
