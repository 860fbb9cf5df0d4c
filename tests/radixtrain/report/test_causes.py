"""What a difference is, from its values."""

from pathlib import Path

import numpy as np
import pytest

from radixtrain.report.causes import CAUSES, WHITE_SPACE, Value, cause_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "report.md"

KNOWN: dict[str, int] = {}


def value(
    text: str, num_rows: int = 1, before: str = "Now: ", after: str = ". Be kind.", repeated: float = 0.0
) -> Value:
    symbols = np.array([KNOWN.setdefault(word, len(KNOWN)) for word in text.split()], dtype=np.int64)
    return Value(text, before, after, symbols, num_rows, repeated)


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        (["2026-01-03", "2025-11-30"], "a date or time"),
        (["3/1/2026", "30.11.25"], "a date or time"),
        (["3rd of March 2026", "May 4, 2025", "Dec 2024"], "a date or time"),
        (["Monday", "Friday"], "a date or time"),
        (["9:05 am", "23:59:01"], "a date or time"),
        (["2026年1月3日", "2025年11月30日"], "a date or time"),
        (["67974bc2-81e0-d3db-88a2-c5840cab5a86", "D7ECA5EE-29FD-C31F-755B-2C0C126A0013"], "a UUID"),
        (["9f86d081884c", "60303ae22b99"], "an id or hash"),
        (["req_8Fk2Lp", "req_91Ysdw"], "an id or hash"),
        (["1,204", "77", "3.5 %"], "a number"),
        (["Maria Lopez", "Ben", "mighty_moose"], "a name"),
        (["may", "march"], "a name"),
        (["what a long and winding question", "is this what somebody else would ask"], "a text of the row's own"),
    ],
)
def test_values_of_one_row_each(texts: list[str], cause: str) -> None:
    found = cause_of([value(text) for text in texts])
    assert found.name == cause and found.moves


def test_a_date_is_seen_in_the_text_around_a_value() -> None:
    found = cause_of([value(day, before="Today is ", after=" March 2026.") for day in ("3", "14")])
    assert found.name == "a date or time"


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        (["red green blue white", "blue red white green"], "the order of a list"),
        (["one two\nthree four", "three four\none two"], "the order of the examples"),
        (['{"function": a } { b "parameters" }', '{ b "parameters" } {"function": a }'], "the order of the tools"),
    ],
)
def test_the_same_words_in_another_order(texts: list[str], cause: str) -> None:
    found = cause_of([value(text) for text in texts])
    assert found.name == cause and not found.moves


def test_few_wordings_of_many_rows_are_versions_and_few_names_are_names() -> None:
    versions = cause_of([value("kind assistant", 60), value("quick agent", 40)])
    names = cause_of([value("Maria", 60, before="You talk to "), value("Ben", 40, before="You talk to ")])
    assert versions.name == "another version of the template"
    assert names.name == "a name"


def test_the_usual_value_does_not_decide() -> None:
    found = cause_of([value("soon", 90), *(value(f"2026-01-0{day}") for day in range(1, 9))])
    assert found.name == "a date or time"


def test_texts_that_other_rows_have_too_are_a_choice() -> None:
    found = cause_of([value(" ".join(f"w{word * row}" for word in range(20)), repeated=0.9) for row in range(1, 9)])
    assert found.name == "the choice of the examples"


def test_the_page_explains_every_cause() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## What breaks sharing")[2]
    causes = {cell for row in table.splitlines() if row.startswith("| ") for cell in row.split("|")[1].split(", ")}
    said = " ".join(causes).replace("or of a list", "the order of a list")
    for name in (*CAUSES, WHITE_SPACE.name):
        assert name in said, name
