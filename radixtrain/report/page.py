"""report.html: one file that shows a report in a browser, without a network.

The numbers and sentences are HTML and need no script. The pictures are drawn by plotly, whose script is part of the
page, as gzip and base64: uncompressed it would take 4.8 MB. The texts of the rows are not trusted. Jinja escapes them,
the pictures get them escaped, and the page's content security policy allows two scripts, by their hashes, and no
request.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from heapq import heappop, heappush
from importlib.resources import files
from pathlib import Path

from radixtrain.data.tokens.decode import shortened
from radixtrain.report import formatting
from radixtrain.report.contents import DataReport, Setting, TreeNode
from radixtrain.report.figures import figures, top_of

__all__ = ["write_page"]

ASSETS = files("radixtrain.report") / "assets"
OUTLINE_RUNS = 60  # runs of the tree that are also listed as text
SHORT_TABLE = 10  # settings that are shown before a reader asks for all
INVISIBLE = str.maketrans({" ": "␣", "\t": "⇥", "\n": "↵\n", "\r": "␍", "\u00a0": "⍽"})


def write_page(report: DataReport, path: str | Path) -> None:
    """Writes the page; a file that is there is replaced. A character that UTF-8 does not have becomes `?`.

    Raises OSError if it cannot be written.
    """
    Path(path).write_text(render(report), encoding="utf-8", errors="replace")


def render(report: DataReport) -> str:
    """The page as text: HTML with its style, scripts and data inside."""
    import jinja2
    from plotly.offline import get_plotlyjs

    plotly, script, pictures = get_plotlyjs(), _asset("page.js"), figures(report)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": formatting.bytes_text,
        "duration": formatting.duration,
        "end": lambda text, longest: text if len(text) <= longest else f"…{text[-longest:]}",
        "start": lambda text, longest: text if len(text) <= longest else f"{text[:longest]}…",
        "ratio": formatting.ratio,
        "rounded": formatting.rounded,
        "shortened": shortened,
        "visible": _visible,
    }
    return environment.from_string(_asset("page.html")).render(
        report=report,
        formatting=formatting,
        settings=_by_speed(report),
        short_table=SHORT_TABLE,
        sections={panel["section"] for panel in pictures["panels"]},
        outline=_outline(report.tree),
        style=_asset("page.css"),
        script=script,
        script_hashes=[_hash(script), _hash(plotly)],
        plotly=_packed(plotly),
        figures=_packed(json.dumps(pictures, ensure_ascii=False, allow_nan=False)),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    """gzip and base64: the same text gives the same characters, none of which means anything in HTML."""
    return b64encode(gzip.compress(text.encode(errors="replace"), 9, mtime=0)).decode()


def _hash(script: str) -> str:
    """What a content security policy calls a script by."""
    return f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"


def _by_speed(report: DataReport) -> Sequence[Setting]:
    """Every setting once: the user's, the best, then the others, the shortest epoch (or the highest r) first."""
    others = sorted(report.settings, key=lambda s: (s.seconds_per_epoch is None, s.seconds_per_epoch or 0.0, -s.r))
    return list(dict.fromkeys([report.current, report.best, *others]))


def _outline(root: TreeNode) -> list[tuple[int, TreeNode]]:
    """(depth, run) in pre-order, of the runs that the most sequences pass through.

    A heap of (-sequences, path, run): no two paths are equal, so runs are never compared.
    """
    listed: list[tuple[tuple[int, ...], TreeNode]] = []
    waiting: list[tuple[int, tuple[int, ...], TreeNode]] = [(0, (), top_of(root))]
    while waiting and len(listed) < OUTLINE_RUNS:
        _, path, node = heappop(waiting)
        listed.append((path, node))
        for number, child in enumerate(node.children):
            heappush(waiting, (-child.num_sequences, (*path, number), child))
    return [(len(path), node) for path, node in sorted(listed, key=lambda entry: entry[0])]


def _visible(text: str) -> str:
    """A text whose white space can be seen if it is nothing else, and a sign for an empty one."""
    return text if text.strip() else text.translate(INVISIBLE) or "(nothing)"
