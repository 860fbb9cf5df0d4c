"""What is hinted at; numbers as they are shown; the report in a terminal and as a page."""

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from radixtrain.errors import bytes_text
from radixtrain.explain.breaks import Break, Example
from radixtrain.explain.prediction import Draw, SampledSteps
from radixtrain.explain.report import (
    SHORT_TEXT,
    DataReport,
    duration,
    fix,
    hints,
    print_report,
    render,
    rounded,
    write_page,
)
from radixtrain.explain.tokens import TextTree
from radixtrain.screen import screen

HOSTILE = """</script><img src=x onerror="document.title='run'"><b>%{y} $x$ <a href="https://example.com">a</a> &lt;"""
SHOWN: dict[Any, dict[float, str]] = {
    rounded: {1.0: "1", 1.843: "1.84", 20.27: "20.3", 100.4: "100", 999.6: "1,000", 1250: "1,250", 349_123: "349,000"},
    bytes_text: {0: "0 MiB", 2**29: "512 MiB", 2**30: "1 GiB", 1.234 * 2**30: "1.23 GiB", 1250 * 2**30: "1,250 GiB"},
    duration: {0.002: "0:00:01", 59.6: "0:01:00", 725: "0:12:05", 108_000: "1 day, 6:00:00"},
}


@pytest.mark.parametrize("function", SHOWN)
def test_numbers(function: Any) -> None:
    assert {number: function(number) for number in SHOWN[function]} == SHOWN[function]


def with_r(r: float, **draw: Any) -> SampledSteps:
    """Steps with these settings, and 32 rows and 1,000 tokens otherwise."""
    draw = {"batch_size": 32, "max_tokens": 1000, **draw}
    counts: dict[str, Any] = {"num_tokens": {"radix": 1000, "ordinary": 1000}, "num_rows": {"radix": round(1000 / r)}}
    return SampledSteps(draw=Draw(**draw), num_steps=1, scale=1.0, **counts)


@pytest.mark.parametrize(
    ("speedup", "others", "beginnings"),
    [
        (2.0, [with_r(6, batch_size=256), with_r(8, group_by_prefix=True), with_r(2.5, max_tokens=4000)], [
            "--data.max_tokens=4000: r = 2.5 in place of 2. The steps stay",
            "--data.group_by_prefix=true: r = 8 in place of 2. Rows of",
            "--data.batch_size=256: r = 5.99 in place of 2. An epoch",
        ]),
        (None, [], []),
        (2.0, [with_r(2.1, batch_size=256), with_r(2.1, max_tokens=4000)], []),
        (2.0, [with_r(r, batch_size=size) for size, r in ((64, 3), (128, 5.8), (256, 6))], ["--data.batch_size=128: "]),
        (0.8, [], ["as they are, these rows gain nothing: a step takes 1.25 of the ordinary time"]),
    ],
)  # fmt: skip
def test_what_would_change_the_steps_is_a_hint_with_its_price(
    speedup: float | None, others: list[SampledSteps], beginnings: list[str]
) -> None:
    own = with_r(2)
    tried = {
        key: [each for each in others if getattr(each.draw, key) != getattr(own.draw, key)] for key in vars(own.draw)
    }
    found = list(hints(own, speedup, tried))
    assert len(found) == len(beginnings)
    assert all(hint.startswith(each) for hint, each in zip(found, beginnings, strict=True)), found


BREAK = Break(
    "a date", 1, 4_812_345, 9_000_000, "Move it.",
    (Example("train.jsonl:12", "Today is ", "2026-11-21", f". {HOSTILE}"), Example("b:1", "end.", " \n\t", "Intents:")),
)  # fmt: skip


def test_what_a_fix_adds_to_the_others_is_said_if_it_is_another_figure() -> None:
    for with_others, said in ((1100, "epoch. Move"), (0, "epoch; 0 once"), (5000, "epoch; 5,000 once the others")):
        text = fix(BREAK._replace(tokens_saved=1000, tokens_with_others=with_others))
        assert text.startswith("a date: fixing only this saves 1,000 computed tokens of an ") and said in text


def tree_of(*texts: str) -> TextTree:
    tokenizer = tiny.train_tokenizer(["x"], 261)
    return TextTree([np.array(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts], tokenizer)


@pytest.fixture(scope="module")
def report() -> DataReport:
    """Its texts are those of an attacker."""
    return DataReport(
        title=HOSTILE,
        model="tiny",
        heading="2x as fast",
        summary=("2,014,000 tokens, of which about 504,000 are computed: r = 4.", "A step is predicted to run at 2x."),
        facts={"rows": "7, 8 samples", "not read": f"{HOSTILE} (2 rows)"},
        tree=tree_of(*(f"You route [bold]\x1b[2J. {HOSTILE}{tail}" for tail in "abcd")),
        tree_sample="4 of the 7 conversations",
        command=f"radixtrain fit --a '{HOSTILE}'",
        breaks=(BREAK, *(BREAK._replace(cause=f"another {n}") for n in range(3))),
        hints=("a date: fixing only this saves 4,810,000 computed tokens.", "--data.batch_size=64: r = 8."),
    )


def in_terminal(report: DataReport) -> str:
    file = StringIO()
    print_report(report, screen(file=file, width=100, highlight=False))
    return file.getvalue()


class Tags(HTMLParser):
    """What a browser makes of a page: its elements, the attributes that load something, its visible text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data if self.tags and self.tags[-1] != "style" else ""


def as_page(report: DataReport) -> str:
    return Tags(render(report)).text


@pytest.mark.parametrize("show", [in_terminal, as_page])
def test_sentences_and_numbers(show: Callable[[DataReport], str], report: DataReport) -> None:
    parts = [
        *("2,014,000 tokens, of which about 504,000 are computed: r = 4.", "A step is", "7, 8 samples", "(2 rows)"),
        *("To train", "radixtrain fit", "Today is ", "2026-11-21", "train.jsonl:12", "--data.batch_size=64: r = 8."),
        *("a date: fixing only this saves", "The prefix tree of 4 of the 7 conversations", "then 4 branches"),
    ]
    text = " ".join(show(report).split())
    assert [part for part in parts if part not in text] == [] and "None" not in text
    bare = " ".join(show(replace(report, breaks=(), hints=())).split())
    assert "Nothing was found" in bare and "What would help" not in bare


def test_the_terminal(report: DataReport) -> None:
    """No line but the command is wider; what would help begins after 25 lines at most; texts are only texts."""
    lines = in_terminal(replace(report, command="python -m radixtrain fit " + "x" * 200)).splitlines()
    assert all(len(line) <= 100 for line in lines if "x" * 200 not in line)
    assert sum("x" * 200 in line for line in lines) == 1
    assert lines.index("What would help") < 25
    assert "\x1b" not in "".join(lines) and "\\x1b[2J" in "".join(lines)


def test_the_page(report: DataReport) -> None:
    """What a row says is never an element. A long run is shortened until it is opened."""
    page = render(report)
    found = Tags(page)
    assert not {"img", "a", "iframe", "object", "script"} & set(found.tags)
    assert found.loaded == ["data:,"]  # the icon
    assert """content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""" in page
    # title, line above the heading, command, 4 examples, a column, tree
    assert found.text.count(HOSTILE) == 9
    assert "end. ↵ ⇥Intents:" in " ".join(found.text.split())
    long = "x" * SHORT_TEXT + "y" * SHORT_TEXT
    page = render(replace(report, tree=tree_of(long, long)))
    assert f"<pre>{long}</pre>" in page and f"<summary>{'x' * 104} … {'y' * 53}</summary>" in page


def test_a_lone_surrogate_is_no_reason_to_fail(report: DataReport, tmp_path: Path) -> None:
    write_page(replace(report, title="a\ud800b"), tmp_path / "b.html")
    assert "a?b" in (tmp_path / "b.html").read_text(encoding="utf-8")
