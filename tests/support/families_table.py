"""The tables of docs/families.md, written from a run of the tests of model families."""

from collections import defaultdict
from pathlib import Path

__all__ = ["FAMILIES_PAGE", "rows_of_page", "write_families_table"]

FAMILIES_PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
REFUSED = "refused: "
FAMILIES_HEADS = {
    "all": ["family", "attention and layers", "float64"],
    "refused": ["refused", "families"],
    "recurrent": [
        *("family", "mixer", "float64", "float32, worst tensor", "float32, median tensor"),
        *("bfloat16, worst tensor", "bfloat16, median tensor"),
    ],
}


def rows_of_page(group: str) -> dict[str, list[str]]:
    """The rows of a group, by family; the second and last cell of a refused one is `refused: ` and the reason."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in _split(group)[1].splitlines() if line]
    rows = [row for row in cells if row not in FAMILIES_HEADS.values() and set(row[0]) != {"-"}]
    equal = {row[0]: row for row in rows if len(row) > 2}
    return equal | {name: [name, REFUSED + row[0]] for row in rows if len(row) == 2 for name in row[1].split("; ")}


def write_families_table(group: str, found: list[list[str]], whole: bool) -> None:
    """The rows of docs/families.md between two markers: the equal families, then the refused ones by their reasons.

    found: rows of this run, which replace those of the page. whole: of every family, so that no other row stays.
    """
    rows = {**({} if whole else rows_of_page(group)), **{row[0]: row for row in found}}
    by_name = sorted(rows.values(), key=lambda row: row[0].lower())
    refused: dict[str, list[str]] = defaultdict(list)
    for name, reason in (row for row in by_name if len(row) == 2):
        refused[reason.removeprefix(REFUSED)].append(name)
    tables = _table(FAMILIES_HEADS.get(group, FAMILIES_HEADS["all"]), [row for row in by_name if len(row) > 2])
    if refused:
        by_reason = [[reason, "; ".join(names)] for reason, names in sorted(refused.items())]
        tables += "\n\n" + _table(FAMILIES_HEADS["refused"], by_reason)
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
