"""The tables of docs/families.md, written from a run of the tests of model families."""

from pathlib import Path

__all__ = ["FAMILIES_PAGE", "rows_of_page", "write_families_table"]

FAMILIES_PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
REFUSED = "refused: "
FAMILIES_HEADS = {
    "all": ["family", "attention and layers", "float64", "float32", "ordinary float32"],
    "refused": ["family", "attention and layers", "refused"],
    "recurrent": [
        *("family", "mixer", "float64", "float32, worst tensor", "float32, median tensor"),
        *("bfloat16, worst tensor", "bfloat16, median tensor"),
    ],
}


def rows_of_page(group: str) -> dict[str, list[str]]:
    """The rows of a group, by family; the third cell of a refused one is `refused: ` and the reason."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in _split(group)[1].splitlines() if line]
    rows = [row for row in cells if row not in FAMILIES_HEADS.values() and set(row[0]) != {"-"}]
    return {row[0]: row if len(row) > 3 else [*row[:2], REFUSED + row[2]] for row in rows}


def write_families_table(group: str, found: list[list[str]], whole: bool) -> None:
    """The rows of docs/families.md between two markers: a table of the equal families, then one of the refused ones.

    found: rows of this run, which replace those of the page. whole: of every family, so that no other row stays.
    """
    rows = {**({} if whole else rows_of_page(group)), **{row[0]: row for row in found}}
    by_name = sorted(rows.values(), key=lambda row: row[0].lower())
    equal = [row for row in by_name if not row[2].startswith(REFUSED)]
    refused = [[*row[:2], row[2].removeprefix(REFUSED)] for row in by_name if row not in equal]
    tables = _table(FAMILIES_HEADS["recurrent" if group == "recurrent" else "all"], equal)
    if refused:
        tables += "\n\n" + _table(FAMILIES_HEADS["refused"], refused)
    before, _, after = _split(group)
    FAMILIES_PAGE.write_text(f"{before}\n{tables}\n{after}", encoding="utf-8")


def _split(group: str) -> tuple[str, str, str]:
    """The page up to the marker, the tables, and the page from the next marker on."""
    begin, end = f"<!-- {group}: begin -->", f"<!-- {group}: end -->"
    before, rest = FAMILIES_PAGE.read_text(encoding="utf-8").split(begin)
    tables, after = rest.split(end)
    return before + begin, tables, end + after


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
