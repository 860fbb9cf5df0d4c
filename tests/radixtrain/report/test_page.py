"""The page as text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from radixtrain.errors import UserError
from radixtrain.report.contents import DataReport, Setting, Splitting, TreeNode
from radixtrain.report.page import SHORT_TEXT, render, tree_rows, write_page


@pytest.fixture(scope="module")
def one_row(report: DataReport) -> DataReport:
    only = Setting(batch_size=8, max_tokens=1024, group_by_prefix=False, r=1.0, best_r=1.0)
    row = TreeNode(text="Hello.", num_tokens=3, num_sequences=1)
    return replace(
        report,
        **{"num_rows": 1, "num_samples": 1, "num_tokens": 3, "num_unique_tokens": 3, "num_labels": 1, "num_prompts": 1},
        **{"length_quantiles": {"max": 3}, "sources": {"a.jsonl": 1}, "max_length": None, "num_over_length": 0},
        **{"current": only, "best": None, "settings": (only,), "breaks": ()},
        tree=TreeNode(text="", num_tokens=0, num_sequences=1, children=(row,)),
    )


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


class TestText:
    def test_what_a_row_says_is_never_an_element(self, report: DataReport) -> None:
        page = render(report)
        found = Tags(page)
        assert not {"img", "a", "iframe", "object", "script"} & set(found.tags)
        assert found.loaded == ["data:,"]  # the icon
        assert """content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""" in page
        # title, line above the headline, command, tree, example, source, environment
        assert found.text.count(report.title) == 7

    def test_sentences_and_numbers(self, report: DataReport) -> None:
        text = " ".join(Tags(render(report)).text.split())
        for part in (
            *("2,014,000 tokens, of which about 504,000 are computed: r = 4", "at 2x the speed", "25 min"),
            "The best settings are batch_size 16, max_tokens 4,096, of those tried that leave the steps",
            *("37 samples are longer than max_length 1,024", "2,310 tokens", "at about token 3", "Move it."),
            *(
                "4,810,000 computed tokens of an epoch are saved by fixing only this; 9,000,000 once the",
                "touches 1 sequence, has 2 different values",
            ),
            *("Today is 2026-11-21. ", "end.␣↵ ⇥Intents:", "Estimated from 500 steps.", "A batch_size of 64"),
            *("With all rows in one tree, r would be 21", "The other 2 settings", "8 0 0 all sequences"),
            *("6 40 200 You route messages.", "2 9 2 more branches"),
        ):
            assert part in text, part

    def test_one_row(self, one_row: DataReport) -> None:
        text = Tags(render(one_row)).text
        for part in (
            "3 tokens, none of them shared",
            "was not predicted",
            "No setting is proposed, since nothing was timed",
            "Nothing was found",
        ):
            assert part in text, part
        assert "None" not in text and "max_length" not in text

    def test_chats_that_are_split_are_compared_with_whole_ones(self, one_row: DataReport) -> None:
        own = replace(one_row.current, r=9.5, whole_r=1.25, speedup=8.0, whole_speedup=1.5)
        split = Splitting(turns=600, changed=0, whole_share=0.13)
        text = Tags(render(replace(one_row, current=own, best=own, settings=(own,), splitting=split))).text
        for part in (
            "r = 1.25 against whole chats",
            "9.5 against the same rows",
            "1.5x the speed",
            "No turn has other",
        ):
            assert part in text, part

    def test_a_lone_surrogate(self, report: DataReport, tmp_path: Path) -> None:
        write_page(replace(report, title="a\ud800b", tree=node("\ud800", 1, 1)), tmp_path / "a.html")
        assert "a?b" in (tmp_path / "a.html").read_text(encoding="utf-8")

    def test_a_link_of_others(self, report: DataReport, tmp_path: Path) -> None:
        """It is neither followed nor replaced."""
        (tmp_path / "other").write_text("mine")
        (tmp_path / "a.html").symlink_to("other")
        with pytest.raises(UserError, match="is there and radixtrain did not write it"):
            write_page(report, tmp_path / "a.html")
        assert (tmp_path / "other").read_text() == "mine" and (tmp_path / "a.html").is_symlink()


def node(text: str, tokens: int, sequences: int, *children: TreeNode) -> TreeNode:
    return TreeNode(text=text, num_tokens=tokens, num_sequences=sequences, children=children)


class TestTree:
    def test_rows_in_pre_order_with_the_hidden_last(self) -> None:
        hidden = {"num_hidden_children": 3, "num_hidden_sequences": 4, "num_hidden_tokens": 50}
        shared = TreeNode(
            text="a", num_tokens=9, num_sequences=7, children=(node("b", 2, 3, node("c", 1, 2)),), **hidden
        )
        rows = list(tree_rows(node("", 0, 8, shared, node("d", 5, 1))))
        assert [(depth, run.text, run.num_tokens, run.num_sequences, hidden) for depth, run, hidden in rows] == [
            *((0, "", 0, 8, 0), (1, "a", 9, 7, 0), (2, "b", 2, 3, 0), (3, "c", 1, 2, 0)),
            *((2, "", 50, 4, 3), (1, "d", 5, 1, 0)),
        ]

    def test_an_empty_root_with_one_child_is_skipped(self) -> None:
        assert [run.text for _, run, _ in tree_rows(node("", 0, 2, node("a", 1, 2)))] == ["a"]

    def test_a_chain_of_thousands(self) -> None:
        chain = node("end", 1, 1)
        for _ in range(5000):
            chain = node("turn", 1, 1, chain)
        assert [depth for depth, _, _ in tree_rows(chain)] == list(range(5001))

    def test_a_long_run_is_shortened_until_it_is_opened(self, report: DataReport) -> None:
        page = render(replace(report, tree=node("x" * SHORT_TEXT + "y" * SHORT_TEXT, 1, 1)))
        summary, rest = re.search(r"<summary>(x[^<]*)</summary><pre>([^<]*)</pre>", page).groups()  # type: ignore[union-attr]
        assert len(summary) == SHORT_TEXT and summary.count("…") == 1
        assert rest == "x" * SHORT_TEXT + "y" * SHORT_TEXT
