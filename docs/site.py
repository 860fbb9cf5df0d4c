"""Lay out the pages of the site in a folder: the repository's pages, and a page for each file that they link to.

    python docs/site.py build/pages

Every page keeps its path, so the links between pages hold. A link to a program or a notebook becomes one to a page that
shows it.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference import with_reference

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"""(\]\(|src(?:set)?=")([^)\s#:"]+)(?=[)#"])""")
FENCE = re.compile(r"^(```\w+) [^\n]*$", re.MULTILINE)  # words after the language are for the tests of the page


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    laid_out: set[Path] = set()
    lay_out(ROOT / "docs/site.css", folder / "docs/site.css")
    while waiting:
        file = waiting.pop()
        if file not in laid_out:
            laid_out.add(file)
            waiting += lay_out(file, folder / file.relative_to(ROOT))


def lay_out(file: Path, target: Path) -> list[Path]:
    """Write what shows a file of the repository; the files that it links to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix in (".css", ".png", ".svg"):
        shutil.copy(file, target)
        return []
    page = PAGES.get(file.suffix, page_of_code)(file)
    links = LINK.findall(page) if file.suffix in PAGES else []
    shown = LINK.sub(lambda link: link[1] + target_of(link[2]), page) if links else page
    target.with_name(target_of(target.name)).write_text(shown, encoding="utf-8")
    return [(file.parent / link).resolve() for _, link in links]


def page_of_markdown(file: Path) -> str:
    page = FENCE.sub(r"\1", file.read_text(encoding="utf-8"))
    return with_reference(page, file.parent) if file.name == "reference.md" else page


def page_of_notebook(file: Path) -> str:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in parts_of(cell))


def parts_of(cell: dict[str, Any]) -> Iterator[str]:
    """The text of a cell, or its code and what this printed."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    printed = "".join(line for output in cell.get("outputs", ()) for line in output["text"])
    if printed:
        yield f"```text\n{printed.rstrip()}\n```"


def page_of_code(file: Path) -> str:
    language = "python" if file.suffix == ".py" else "text"
    code = file.read_text(encoding="utf-8").rstrip()
    return f"# {file.name}\n\n`{file.relative_to(ROOT)}`\n\n````{language}\n{code}\n````\n"


PAGES = {".md": page_of_markdown, ".ipynb": page_of_notebook}


def target_of(link: str) -> str:
    return link if link.endswith((".md", ".css", ".png", ".svg")) else f"{link}.md"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
