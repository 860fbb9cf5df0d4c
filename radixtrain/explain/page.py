"""report.html: one file without scripts that shows a report in a browser, without a network.

The texts of the rows are not trusted: Jinja escapes them, and the page's content security policy allows no script and
no request.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.data.tokens.decode import shortened
from radixtrain.explain.contents import DataReport
from radixtrain.explain.tokens import visible

ASSETS = files("radixtrain.explain") / "assets"
TREE_LINES = 100
SHORT_TEXT = 160  # characters of a run that are shown before a reader opens it


def write_page(report: DataReport, path: str | Path) -> None:
    """Write the page, replacing a file or link that is there. A character that UTF-8 does not have becomes `?`.

    Raises OSError if it cannot be written.
    """
    with writing_file(Path(path)) as partial:
        partial.write_text(render(report), encoding="utf-8", errors="replace")


def render(report: DataReport) -> str:
    """Render the page as HTML with its style inside."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shortened": shortened, "visible": visible}
    return environment.from_string((ASSETS / "page.html").read_text(encoding="utf-8")).render(
        report=report,
        short_text=SHORT_TEXT,
        lines=list(report.tree.lines(TREE_LINES)),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )
