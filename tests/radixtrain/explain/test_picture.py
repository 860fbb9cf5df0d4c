"""The prefix tree as a terminal shows it, in widths of 80 and 120."""

import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.token_row import TokenRow
from radixtrain.explain.micro_batch import BatchTree, MicroBatch, draw, named_rows

Build, Part, Print = Callable[..., TokenRow], Callable[..., MicroBatch], Callable[..., str]


@pytest.fixture
def drawn(tokenizer: PreTrainedTokenizerBase, part_of: Part, printed: Print) -> Print:
    def draw_it(samples: list[TokenRow], width: int = 80, full: bool = False, **options: object) -> str:
        part = part_of(samples)
        return printed(
            draw(BatchTree(part, tokenizer), [sample.where for sample in part.samples], full), width, **options
        )

    return draw_it


def test_a_tree_of_two_levels(sample_of: Build, drawn: Print) -> None:
    answers = ("Yes", "Yes", "Yet", "No")
    samples = [sample_of("Is it?\n", answer, f"data/chats.jsonl:{n}") for n, answer in enumerate(answers, start=1)]
    assert drawn(samples).splitlines() == [
        "×4  tokens 0-6: 7",
        "Is it?↵",
        'token 6 predicts "Y" ×3, "N" ×1',
        "├── ×3  tokens 7-8: 2, 2 with loss",
        "│   ⟦Ye⟧",
        '│   token 8 predicts "s" ×2, "t" ×1',
        "│   ├── ×2  token 9, 1 with loss; ends chats.jsonl:1, chats.jsonl:2",
        "│   │   ⟦s⟧",
        "│   └── ×1  token 10, 1 with loss; ends chats.jsonl:3",
        "│       ⟦t⟧",
        "└── ×1  tokens 11-12: 2, 2 with loss; ends chats.jsonl:4",
        "    ⟦No⟧",
    ]


def test_the_weight_of_a_shared_token_that_not_all_learn(sample_of: Build, drawn: Print) -> None:
    samples = [sample_of("a", "bc", "x:1"), sample_of("abc", "d", "x:2"), sample_of("abc", "e", "x:3")]
    assert drawn(samples).splitlines()[:2] == ["×3  tokens 0-2: 3, 2 with loss; ends x:1", "a⟦bc⟧×1"]


def test_colour_marks_what_brackets_mark(sample_of: Build, drawn: Print) -> None:
    shown = drawn([sample_of("a", "b")], force_terminal=True, color_system="standard")
    assert "\x1b[1;32m⟦\x1b[0m\x1b[1;32mb\x1b[0m\x1b[1;32m⟧\x1b[0m" in shown


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_conversation_stays_within_the_width(sample_of: Build, drawn: Print, width: int) -> None:
    """One sample for each turn: a tree that is as deep as the conversation is long."""
    history = "".join(f"Where is thing {turn}? It is on shelf {turn}. " for turn in range(40))
    turns = [history[: history.index(f"thing {turn}?")] for turn in range(40)]
    lines = drawn([sample_of(prompt, f"thinking {turn}") for turn, prompt in enumerate(turns)], width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert max(line.index("×") for line in lines if re.search(r"×\d+  token", line)) <= 4 * 9
    assert sum(" after token " in line for line in lines) >= 25


def test_a_bushy_tree_is_indented_no_further_than_some_levels(sample_of: Build, drawn: Print) -> None:
    """Every prefix of both letters: 2 ** 12 leaves would be too many, so those of a few paths."""
    words = [f"{number * 2654435761 % 2**14:014b}" for number in range(60)]
    lines = drawn([sample_of("", word) for word in words], full=True).splitlines()
    assert max(len(line) - len(line.lstrip("│├└─ ")) for line in lines) <= 4 * 9


def test_long_runs_and_many_branches_are_shortened(sample_of: Build, drawn: Print) -> None:
    samples = [sample_of("p" * 2000, chr(97 + n) + "x" * 99) for n in range(20)]
    shown = drawn(samples)
    assert "⋯ 1,760 tokens ⋯" in shown.replace("\n", "")
    assert shown.splitlines()[-1] == "└── ⋯ 8 more branches ⋯"
    assert '"a" ×1' in shown and " and 8 more" in shown.replace("\n", "")
    full = drawn(samples, full=True)
    assert "⋯" not in full and full.count("p") > 2000


def test_names_of_rows() -> None:
    wheres = ["a/x.jsonl:3", "a/x.jsonl:1", "a/x.jsonl:3", "a/x.jsonl:4", "a/x.jsonl:5"]
    assert named_rows(wheres) == "x.jsonl:3 (2 samples), x.jsonl:1, x.jsonl:4 and 1 more"
