"""Lay out the pages of the site in a folder: the repository's pages, and a page for each file that they link to.

    python docs/site.py build/pages

Every page keeps its path, so the links between pages hold. A link to a program becomes one to a page that shows it.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")
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
    if file.suffix == ".md":
        page = FENCE.sub(r"\1", file.read_text(encoding="utf-8"))
        target.write_text(LINK.sub(lambda link: link[1] + page_of(link[2]), page), encoding="utf-8")
        return [(file.parent / link).resolve() for _, link in LINK.findall(page)]
    if is_shown(file.name):
        code = file.read_text(encoding="utf-8").rstrip()
        language = {".py": "python", ".ipynb": "json"}.get(file.suffix, "text")
        page = f"# {file.name}\n\n`{file.relative_to(ROOT)}`\n\n````{language}\n{code}\n````\n"
        target.with_name(page_of(file.name)).write_text(page, encoding="utf-8")
    else:
        shutil.copy(file, target)
    return []


def is_shown(name: str) -> bool:
    return not name.endswith((".md", ".css", ".png", ".svg"))


def page_of(link: str) -> str:
    return f"{link}.md" if is_shown(link) else link


if __name__ == "__main__":
    main(Path(sys.argv[1]))
