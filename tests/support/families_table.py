"""The tables of docs/families.md, written from a run of the tests of model families."""

from pathlib import Path

__all__ = ["write_families_table"]

FAMILIES_PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
FAMILIES_HEADS = {
    "all": ["family", "attention and layers", "float64", "float32", "ordinary float32"],
    "recurrent": [
        *("family", "mixer", "float64", "float32, worst tensor", "float32, median tensor"),
        *("bfloat16, worst tensor", "bfloat16, median tensor"),
    ],
}


def write_families_table(group: str, found: list[list[str]], whole: bool) -> None:
    """A table of docs/families.md, between its two markers: the equal families first, then the refused ones.

    found: rows of this run, which replace those of the page. whole: of every family, so that no other row stays.
    """
    begin, end = f"<!-- {group}: begin -->", f"<!-- {group}: end -->"
    before, rest = FAMILIES_PAGE.read_text(encoding="utf-8").split(begin)
    said, after = rest.split(end)
    kept = [] if whole else [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines()[3:]]
    by_name = sorted(
        {row[0]: row for row in [*kept, *found]}.values(),
        key=lambda row: (row[2].startswith("refused"), row[0].lower()),
    )
    head = FAMILIES_HEADS["recurrent" if group == "recurrent" else "all"]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *by_name])
    FAMILIES_PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")
