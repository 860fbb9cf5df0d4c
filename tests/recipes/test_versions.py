"""The page of versions: the outcome of each test, and each reason once."""

from xml.etree import ElementTree

import versions


def test_outcomes():
    report = ElementTree.fromstring(
        '<testsuite><testcase/><testcase><skipped message="why"/></testcase><testcase><error message="at import"/>'
        "</testcase><testcase><failure/></testcase></testsuite>"
    )
    outcomes = [versions.outcome(case) for case in report]
    assert outcomes == [("passed", ""), ("skipped", "why"), ("failed", "at import"), ("failed", "")]


def test_each_reason_once():
    reasons = [
        *("Qwen3.5: refused: conv layers", "LFM2: refused: conv layers", "Qwen3.5: refused: conv layers"),
        *("DBRX: transformers 5.2.0 fails by itself: mat1 (9x32)\nand more", "transformers 5.2.0 has no LaguConfig"),
        *("before transformers 5.6: no forks", "before transformers 5.6: no forks", "needs CUDA"),
    ]
    assert list(versions.lines_of(reasons)) == [
        "- refused: conv layers: LFM2, Qwen3.5",
        "- fails by itself: DBRX",
        "- has no: 1 of the classes that are tested",
        "- before transformers 5.6: no forks (2 tests)",
        "- needs CUDA (1 test)",
    ]
