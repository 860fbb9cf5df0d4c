"""What a difference is, from its values."""

from pathlib import Path

import pytest

from radixtrain.explain.causes import MADE_ALIKE, MOVED, Value, cause_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "report.md"
DAYS = [f"2026-01-0{day}" for day in range(1, 9)]


def value(text: str, num_rows: int = 1, before: str = "Now: ", after: str = ". Be kind.", repeated: float = 0) -> Value:
    return Value(text, before, after, num_rows, repeated)


def values(*texts: str, **rest: object) -> list[Value]:
    return [value(text, **rest) for text in texts]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (values("2026-01-03", "2025-11-30"), "a date or time"),
        (values("3/1/2026", "30.11.25"), "a date or time"),
        (values("3rd of March 2026", "May 4, 2025", "Dec 2024"), "a date or time"),
        (values("9:05 am", "23:59:01"), "a date or time"),
        (values("2026年1月3日", "2025年11月30日"), "a date or time"),
        (values("3", "14", before="Today is ", after=" March 2026."), "a date or time"),
        ([value("soon", 90), *values(*DAYS)], "a date or time"),  # the usual value does not decide
        (values("67974bc2-81e0-d3db-88a2-c5840cab5a86", "D7ECA5EE-29FD-C31F-755B-2C0C126A0013"), "a UUID"),
        (values("req_8Fk2Lp", "req_91Ysdw"), "an id or hash"),
        (values("1,204", "77", "3.5 %"), "a number"),
        (values("Maria Lopez", "Ben", "mighty_moose"), "a name"),
        (values("what a long and winding question", "is this what somebody else would ask"), "a text of the row's own"),
        (values("red green blue white", "blue red white green"), "the order of a list"),
        (values("- one\n- two\n- three", "- three\n- one\n- two"), "the order of a list"),
        (values(*(" ".join(f"w{n * step % 31}" for n in range(31)) for step in (1, 3))), "the order of the examples"),
        (values('{"function": a } { "parameters" }', '{ "parameters" } {"function": a }'), "the order of the tools"),
        (values("kind assistant", "quick agent", num_rows=50), "several prompts"),
        ([value("kind assistant", 95), value("quick agent", 5)], "another version of the template"),
        (values(*(" ".join(f"w{n * row}" for n in range(20)) for row in range(1, 9)), repeated=0.9),
         "the choice of the examples"),
    ],
)  # fmt: skip
def test_the_cause_of_values(found: list[Value], cause: str) -> None:
    assert cause_of(found).name == cause
    assert cause_of(found).moves == (cause in MOVED)


def test_the_page_explains_every_cause() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## What breaks sharing")[2]
    causes = {cell for row in table.splitlines() if row.startswith("| ") for cell in row.split("|")[1].split(", ")}
    said = " ".join(causes).replace("or of a list", "the order of a list")
    for name in (*MOVED, *MADE_ALIKE):
        assert name in said, name
