"""The page as text, and as a browser shows it."""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from gzip import decompress
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from headless_browser import Browser
from tiers import FULL, cases

from radixtrain.report.contents import DataReport, Setting, Splitting, TreeNode
from radixtrain.report.page import MIN_TEXT, OUTLINE_RUNS, TEXT_BUDGET, icicle, render, top_of, write_page

SCHEMES = ["light", "dark"]
BLOCKS = "document.querySelectorAll('#tree path.surface')"


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
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)
        elif self.tags and self.tags[-1] != "style":
            self.text += data


class TestText:
    def test_what_a_row_says_is_never_an_element(self, report: DataReport) -> None:
        found = Tags(render(report))
        assert not {"img", "a", "iframe", "object"} & set(found.tags)
        assert found.loaded == ["data:,"]  # the icon
        assert found.tags.count("script") == 3
        # title, line above the headline, command, tree, example, source, environment
        assert found.text.count(report.title) == 7

    def test_the_policy_allows_our_two_scripts(self, report: DataReport) -> None:
        page = render(report)
        policy = re.search(r"Content-Security-Policy\" content=\"([^\"]+)\"", page)
        assert policy and "default-src 'none'" in policy[1]
        packed, _, own = Tags(page).scripts
        for script in (decompress(b64decode(packed)), own.encode()):
            assert f"'sha256-{b64encode(sha256(script).digest()).decode()}'" in policy[1]

    def test_sentences_and_numbers(self, report: DataReport) -> None:
        text = " ".join(Tags(render(report)).text.split())
        for part in (
            *("2,014,000 tokens, of which about 504,000 are computed: r = 4", "at 2x the speed", "25 min"),
            "The best settings are batch_size 16, max_tokens 4,096, of those tried that leave the steps",
            *("37 samples are longer than max_length 1,024", "2,310 tokens", "at about token 3", "Move it."),
            *("4,810,000 computed tokens", "touches 1 sequence, has 2 different values"),
            *("Today is 2026-11-21. ", "end.␣↵ ⇥Intents:", "Estimated from 500 steps.", "A batch_size of 64"),
            *(
                "With all rows in one tree, r would be 21",
                "The other 2 settings",
                "8 × 0",
                "6 × 40 You route messages.",
            ),
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

    def test_the_outline_shows_the_runs_that_most_sequences_pass_through(self, report: DataReport) -> None:
        rare = [node(f"rare{n}", 1, 1) for n in range(100)]
        common = node("common", 1, 50, node("below", 1, 50))
        text = Tags(render(replace(report, tree=node("", 0, 150, *rare, common)))).text
        assert len(re.findall(r"rare\d+", text)) == OUTLINE_RUNS - 3
        assert "common" in text and "below" in text

    def test_a_lone_surrogate(self, report: DataReport, tmp_path: Path) -> None:
        write_page(replace(report, title="a\ud800b", tree=node("\ud800", 1, 1)), tmp_path / "a.html")
        assert "a?b" in (tmp_path / "a.html").read_text(encoding="utf-8")


def node(text: str, tokens: int, sequences: int, *children: TreeNode) -> TreeNode:
    return TreeNode(text=text, num_tokens=tokens, num_sequences=sequences, children=children)


class TestIcicle:
    def test_entries_in_pre_order_with_the_hidden_last(self) -> None:
        hidden = {"num_hidden_children": 3, "num_hidden_sequences": 4, "num_hidden_tokens": 50}
        shared = TreeNode(
            text="a", num_tokens=9, num_sequences=7, children=(node("b", 2, 3, node("c", 1, 2)),), **hidden
        )
        assert icicle(node("", 0, 8, shared, node("d", 5, 1))) == {
            "parents": [-1, 0, 1, 2, 1, 0],
            "texts": ["", "a", "b", "c", "", "d"],
            "tokens": [0, 9, 2, 1, 50, 5],
            "sequences": [8, 7, 3, 2, 4, 1],
            "branches": [0, 0, 0, 0, 3, 0],
        }

    def test_an_empty_root_with_one_child_is_skipped(self) -> None:
        assert top_of(node("", 0, 2, node("a", 1, 2))).text == "a"
        assert icicle(node("", 0, 2, node("a", 1, 2)))["parents"] == [-1]

    def test_a_chain_of_thousands(self) -> None:
        chain = node("end", 1, 1)
        for _ in range(5000):
            chain = node("turn", 1, 1, chain)
        assert icicle(chain)["parents"] == list(range(-1, 5000))

    def test_texts_are_bounded_together(self) -> None:
        many = node("", 0, 3000, *(node("x" * 500, 1, 1) for _ in range(3000)))
        texts = icicle(many)["texts"]
        assert max(map(len, texts)) == TEXT_BUDGET // 3001 > MIN_TEXT
        assert texts[1].count("…") == 1


class TestBrowser:
    @pytest.fixture(scope="class")
    def pages(
        self, report: DataReport, one_row: DataReport, tmp_path_factory: pytest.TempPathFactory
    ) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("pages")
        paths = {"full": folder / "full.html", "one row": folder / "one row.html"}
        write_page(report, paths["full"])
        write_page(one_row, paths["one row"])
        return paths

    @pytest.fixture(autouse=True)
    def clean(self, browser: Browser) -> Iterator[None]:
        """No error on the console, nothing refused by the policy, no request but the file itself."""
        yield
        assert browser.errors == []
        assert len(browser.requests) == 1 and browser.requests[0].startswith("file:")

    @pytest.mark.parametrize("scheme", cases(SCHEMES, ["light"]))
    @pytest.mark.parametrize("width", cases([400, 1280], [400]))
    @pytest.mark.parametrize(("name", "runs"), cases([("full", 7), ("one row", 1)], [("full", 7)]))
    def test_is_drawn(
        self, browser: Browser, pages: dict[str, Path], name: str, runs: int, width: int, scheme: str
    ) -> None:
        browser.open(pages[name], width=width, scheme=scheme)
        assert browser.evaluate(f"{BLOCKS}.length") == runs
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")

    def test_the_text_of_runs_is_in_their_blocks(self, browser: Browser, pages: dict[str, Path]) -> None:
        browser.open(pages["full"])
        drawn = browser.evaluate("document.querySelector('#tree').textContent")
        parts = "all sequences", "You route messages.", "40 tokens, 6 sequences", "Where is my card?", "2 more branches"
        for part in parts:
            assert part in drawn.replace("\u00a0", " "), part
        assert "</script><img src=x" in drawn and "<b>%{y}" in drawn
        assert browser.evaluate("document.querySelectorAll('img, #tree a').length") == 0
        assert browser.evaluate("document.title").startswith("</script>")

    @FULL
    def test_hover_shows_text_tokens_and_sequences(self, browser: Browser, pages: dict[str, Path]) -> None:
        browser.open(pages["full"])
        browser.move(*middle_of(browser, block_with("You route messages.")))
        browser.until("document.querySelector('#tree .hoverlayer .hovertext')")
        label = browser.evaluate("document.querySelector('#tree .hoverlayer').textContent")
        assert (
            "40 tokens, 6 sequences: computed once, which saves 200 tokens" in label and "You route messages." in label
        )
        assert browser.evaluate("document.querySelector('#run-text').textContent") == "You route messages."

    @FULL
    def test_click_zooms_in_and_the_first_block_zooms_out(self, browser: Browser, pages: dict[str, Path]) -> None:
        browser.open(pages["full"])
        width = "document.querySelector('#tree path.surface').getBoundingClientRect().width"
        before = browser.evaluate(width)
        browser.click(*middle_of(browser, block_with("Where is my card?")))
        browser.until("!document.querySelector('#tree .iciclelayer').textContent.includes('Translate')")
        assert browser.evaluate(f"{BLOCKS}.length") == 4 + 2  # it, two answers, the hidden; two above it as a path
        assert browser.evaluate(width) > before
        browser.click(*middle_of(browser, block_with("Where is my card?")))
        browser.until("document.querySelector('#tree .iciclelayer').textContent.includes('You route')")

    @FULL
    def test_follows_the_scheme_and_the_width(self, browser: Browser, pages: dict[str, Path]) -> None:
        browser.open(pages["full"], width=1280)
        colour = "document.querySelector('#tree path.surface').style.fill"
        light = browser.evaluate(colour)
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        browser.until(f"{colour} !== '{light}'")
        browser.call("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=False)
        browser.until("document.querySelector('#tree .main-svg').getBoundingClientRect().width < 400")

    @FULL
    def test_copies_the_command(self, browser: Browser, pages: dict[str, Path], report: DataReport) -> None:
        browser.open(pages["full"])
        browser.evaluate("document.addEventListener('copy', () => { window.copied = getSelection().toString() })")
        browser.click(*middle_of(browser, "[data-copy]"))  # a browser copies only on a real click
        assert browser.evaluate("window.copied") == report.command

    @FULL
    def test_says_so_if_the_tree_cannot_be_drawn(
        self, browser: Browser, pages: dict[str, Path], tmp_path: Path
    ) -> None:
        page = pages["full"].read_text(encoding="utf-8")
        (tmp_path / "broken.html").write_text(re.sub('(id="entries">)[^<]{9}', r"\1AAAAAAAAA", page), encoding="utf-8")
        browser.open(tmp_path / "broken.html")
        assert "It is here as text" in " ".join(
            browser.evaluate("document.querySelector('#not-drawn').innerText").split()
        )
        assert len(browser.errors) == 1
        browser.errors.clear()


def block_with(text: str) -> str:
    """JavaScript for the block of the tree that shows a text."""
    return f"[...document.querySelectorAll('#tree .slice')].find((each) => each.textContent.includes({text!r}))"


def middle_of(browser: Browser, element: str) -> tuple[float, float]:
    """Where to point at an element, given by a selector or a JavaScript expression; scrolls it into view."""
    found = element if "(" in element else f"document.querySelector({element!r})"
    x, y = browser.evaluate(
        f"(() => {{ const found = {found}; found.closest('.plot, div').scrollIntoView();"
        " const box = (found.querySelector('path.surface') ?? found).getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2] })()"
    )
    return x, y
