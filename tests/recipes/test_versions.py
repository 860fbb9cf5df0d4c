"""The page of versions: the outcome of each test, and what each version lacks."""

import json
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import versions


def test_outcomes():
    report = ElementTree.fromstring(
        '<testsuite><testcase/><testcase><skipped message="why"/></testcase><testcase><error message="at import"/>'
        "</testcase><testcase><failure/></testcase></testsuite>"
    )
    outcomes = [versions.outcome(case) for case in report]
    assert outcomes == [("passed", ""), ("skipped", "why"), ("failed", "at import"), ("failed", "")]


def test_what_is_refused():
    def case(*said):
        value = quoteattr(json.dumps([260, "text", *said]))
        return ElementTree.fromstring(
            f'<testcase><properties><property name="family" value={value}/></properties></testcase>'
        )

    assert versions.refusal(case("BLOOM", "refused: ALiBi")) == ("refused: ALiBi", "BLOOM (text)")
    assert versions.refusal(case("Llama", "full attention")) is None
    assert versions.refusal(ElementTree.fromstring("<testcase/>")) is None


def test_what_a_skipped_test_lacks():
    assert [versions.split(reason) for reason in (
        "Qwen3.5: refused: conv layers",
        "DBRX: transformers 5.2.0 fails by itself: mat1 (9x32)\nand more",
        "transformers 5.2.0 has no LaguConfig",
        "before transformers 5.6: no forks",
    )] == [
        ("refused: conv layers", "Qwen3.5"),
        ("fails by itself", "DBRX"),
        (versions.HAS_NO, "LaguConfig"),
        ("before transformers 5.6: no forks", ""),
    ]  # fmt: skip


def test_each_reason_once():
    found = {
        ("refused: conv layers", "Qwen3.5"): ["5.2.0", "5.6.2"],
        ("refused: conv layers", "LFM2"): ["5.2.0", "5.6.2"],
        (versions.HAS_NO, "LaguConfig"): ["5.2.0"],
        ("before transformers 5.6: no forks", ""): ["5.2.0"],
    }
    assert versions.page("Intro.", [("5.2.0", 9, 4, 0, 1)], found).splitlines()[-2:] == [
        "| before transformers 5.6: no forks | 5.2.0 |",
        "| refused: conv layers: LFM2, Qwen3.5 | 5.2.0, 5.6.2 |",
    ]
