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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import heappop, heappush
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

from radixtrain.data.tokens.decode import shortened
from radixtrain.report import formatting
from radixtrain.report.contents import DataReport, Setting, TreeNode

__all__ = ["figures", "icicle", "panels", "write_page"]

ASSETS = files("radixtrain.report") / "assets"
OUTLINE_RUNS = 60  # runs of the tree that are also listed as text
TEXT_BUDGET = 300_000  # characters of all runs in the picture, which bounds the size of the page
MIN_TEXT = 40
SHORT_TABLE = 10  # settings that are shown before a reader asks for all
ORDERS = {False: "shuffled", True: "group_by_prefix"}
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
    return list(dict.fromkeys([report.current, *_proposed(report), *others]))


def _proposed(report: DataReport) -> list[Setting]:
    return [] if report.best is None else [report.best]


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


@dataclass(frozen=True)
class Quantity:
    """What a panel shows of a setting; None if it was not predicted. limit: what the setting could reach, if known."""

    title: str
    unit: str
    value: Callable[[Setting], float | None]
    limit: Callable[[Setting], float] | None = None


def quantities(settings: Sequence[Setting]) -> dict[str, Quantity]:
    """By section of the page. Memory is in GiB, or in MiB if all of it is below one GiB."""
    most = max((s.memory_bytes or 0 for s in settings), default=0)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    return {
        "r": Quantity("r, tokens per computed token", "", lambda s: s.least_r, limit=lambda s: s.best_r),
        "speedup": Quantity("predicted speed-up", "x", lambda s: s.least_speedup),
        "memory": Quantity(
            f"peak memory, {unit}", f" {unit}", lambda s: None if s.memory_bytes is None else s.memory_bytes / size
        ),
    }


def figures(report: DataReport) -> dict[str, Any]:
    """The tree, and the panels of lines."""
    return {"tree": icicle(report.tree), "panels": panels(report)}


def icicle(root: TreeNode) -> dict[str, list[Any]]:
    """One entry for each run, in pre-order, and for each group of hidden children.

    parents: index of the entry above, -1 for the first. texts: shortened. tokens, sequences: of the run.
    branches: 0 for a run, else the hidden children that the entry stands for.
    """
    entries = list(_entries(top_of(root)))
    longest = max(MIN_TEXT, TEXT_BUDGET // len(entries))
    return {
        "parents": [parent for parent, _, _ in entries],
        "texts": [shortened(node.text, longest) for _, node, _ in entries],
        "tokens": [node.num_tokens for _, node, _ in entries],
        "sequences": [node.num_sequences for _, node, _ in entries],
        "branches": [branches for _, _, branches in entries],
    }


def top_of(root: TreeNode) -> TreeNode:
    """The first run that says something: an empty root that everything leaves by one child is skipped."""
    while not root.num_tokens and len(root.children) == 1 and not root.num_hidden_children:
        root = root.children[0]
    return root


def panels(report: DataReport) -> list[dict[str, Any]]:
    """Each quantity over batch_size and over max_tokens, the other one as in the user's settings.

    A panel has at least two places on its x axis. marks: the user's settings, and the best ones if they are on a line.
    """
    drawn = list(dict.fromkeys([*report.settings, report.current, *_proposed(report)]))
    made = []
    for section, quantity in quantities(drawn).items():
        for axis, fixed in (("batch_size", "max_tokens"), ("max_tokens", "batch_size")):
            held = getattr(report.current, fixed)
            points = [s for s in drawn if getattr(s, fixed) == held and quantity.value(s) is not None]
            if len({getattr(s, axis) for s in points}) > 1:
                panel = {"section": section, "axis": axis, "y": quantity.title, "unit": quantity.unit}
                made.append({**panel, "title": f"{fixed} {held:,}", **_drawing(report, points, axis, quantity)})
    return made


def _drawing(report: DataReport, points: Sequence[Setting], axis: str, quantity: Quantity) -> dict[str, Any]:
    """lines: name, whether the rows are grouped, whether it is a limit (dashed), x, y. marks: name, x, y."""
    lines = []
    for grouped, name in ORDERS.items():
        on = sorted((s for s in points if s.group_by_prefix == grouped), key=attrgetter(axis))
        line = {"grouped": grouped, "x": [getattr(s, axis) for s in on]}
        lines.append({**line, "name": name, "limit": False, "y": [quantity.value(s) for s in on]})
        if quantity.limit:
            lines.append({**line, "name": f"best r, {name}", "limit": True, "y": [quantity.limit(s) for s in on]})
    named = {"yours": report.current, "best": report.best}
    marks = [{"name": n, "x": getattr(s, axis), "y": quantity.value(s)} for n, s in named.items() if s and s in points]
    return {"lines": [line for line in lines if line["x"]], "marks": marks}


def _entries(top: TreeNode) -> Iterator[tuple[int, TreeNode, int]]:
    """(index of the parent, node, hidden children that it stands for) in pre-order. A stack: chains may be deep."""
    waiting, count = [(-1, top, 0)], 0
    while waiting:
        parent, node, branches = waiting.pop()
        yield parent, node, branches
        if not branches:
            if node.num_hidden_children:
                waiting.append((count, _hidden(node), node.num_hidden_children))
            waiting += [(count, child, 0) for child in reversed(node.children)]
        count += 1


def _hidden(node: TreeNode) -> TreeNode:
    return TreeNode(text="", num_tokens=node.num_hidden_tokens, num_sequences=node.num_hidden_sequences)
