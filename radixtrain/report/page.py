"""report.html: one file that shows a report in a browser, without a network.

The numbers and sentences are HTML and need no script. The tree is drawn by plotly, whose script is part of the page, as
gzip and base64: uncompressed it would take 4.8 MB. The texts of the rows are not trusted. Jinja escapes them, the
picture gets them escaped, and the page's content security policy allows two scripts, by their hashes, and no request.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from heapq import heappop, heappush
from importlib.resources import files
from pathlib import Path
from typing import Any

from radixtrain.data.tokens.decode import shortened
from radixtrain.report import formatting
from radixtrain.report.contents import DataReport, Setting, TreeNode

ASSETS = files("radixtrain.report") / "assets"
OUTLINE_RUNS = 60  # runs of the tree that are also listed as text
TEXT_BUDGET = 300_000  # characters of all runs in the picture, which bounds the size of the page
MIN_TEXT = 40
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

    plotly, script = get_plotlyjs(), _asset("page.js")
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
        outline=_outline(report.tree),
        style=_asset("page.css"),
        script=script,
        script_hashes=[_hash(script), _hash(plotly)],
        plotly=_packed(plotly),
        tree=_packed(json.dumps(icicle(report.tree), ensure_ascii=False, allow_nan=False)),
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
    return list(dict.fromkeys([report.current, *([report.best] if report.best else []), *others]))


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
