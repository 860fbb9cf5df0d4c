"""The tables of recipes/benchmarks/families.md, written from a run of the tests of model families."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

FAMILIES_PAGE = Path(__file__).resolve().parents[3] / "recipes" / "benchmarks" / "families.md"


REFUSED = "refused: "


HEADS = ("attention and layers", "refused")


def said_of_families(group: str) -> dict[str, str]:
    """What the page says of each family of a group: its attention and layers, or `refused: ` and the reason."""
    said: dict[str, str] = {}
    refused = ""
    for line in _split(group)[1].splitlines():
        what, names = (cell.strip() for cell in line.strip("|").split("|")) if line else ("", "")
        if what in HEADS:
            refused = REFUSED if what == "refused" else ""
        elif set(what) - {"-"}:
            said |= dict.fromkeys(names.split("; "), refused + what)
    return said


def write_families_table(group: str, found: Iterable[tuple[str, str]], whole: bool) -> None:
    """The tables of the page between two markers: equal families by their layers, refused ones by reasons.

    found: families of this run and what is said of each, in place of what the page says. whole: there are no others.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for name, what in sorted({**({} if whole else said_of_families(group)), **dict(found)}.items(), key=_by_name):
        families[what].append(name)
    equal = {what: names for what, names in families.items() if not what.startswith(REFUSED)}
    refused = {what.removeprefix(REFUSED): names for what, names in families.items() if what not in equal}
    tables = "\n\n".join(_table(head, part) for head, part in zip(HEADS, (equal, refused), strict=True) if part)
    before, _, after = _split(group)
    FAMILIES_PAGE.write_text(f"{before}\n{tables}\n{after}", encoding="utf-8")


def _by_name(said: tuple[str, str]) -> str:
    return said[0].lower()


def _split(group: str) -> tuple[str, str, str]:
    """The page up to the marker, the tables, and the page from the next marker on."""
    begin, end = f"<!-- {group}: begin -->", f"<!-- {group}: end -->"
    before, rest = FAMILIES_PAGE.read_text(encoding="utf-8").split(begin)
    tables, after = rest.split(end)
    return before + begin, tables, end + after


def _table(head: str, families: dict[str, list[str]]) -> str:
    rows = [(head, "families"), ("---", "---"), *((what, "; ".join(families[what])) for what in sorted(families))]
    return "\n".join(f"| {what} | {names} |" for what, names in rows)
