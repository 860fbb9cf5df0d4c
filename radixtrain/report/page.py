"""report.html: one file without scripts that shows a report in a browser, without a network.

The texts of the rows are not trusted: Jinja escapes them, and the page's content security policy allows no script and
no request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.data.tokens.decode import shortened
from radixtrain.errors import bytes_text
from radixtrain.report import contents
from radixtrain.report.contents import DataReport, Setting, TreeNode

ASSETS = files("radixtrain.report") / "assets"
SHORT_TABLE = 10  # settings that are shown before a reader opens all
SHORT_TEXT = 160  # characters of a run that are shown before a reader opens it
INVISIBLE = str.maketrans({" ": "␣", "\t": "⇥", "\n": "↵\n", "\r": "␍", "\u00a0": "⍽"})


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
    environment.filters |= {
        "bytes": bytes_text,
        "duration": contents.duration,
        "end": lambda text, longest: text if len(text) <= longest else f"…{text[-longest:]}",
        "start": lambda text, longest: text if len(text) <= longest else f"{text[:longest]}…",
        "ratio": contents.ratio,
        "rounded": contents.rounded,
        "shortened": shortened,
        "visible": _visible,
    }
    return environment.from_string((ASSETS / "page.html").read_text(encoding="utf-8")).render(
        report=report,
        contents=contents,
        settings=_by_speed(report),
        short_table=SHORT_TABLE,
        short_text=SHORT_TEXT,
        runs=list(tree_rows(report.tree)),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )


def _by_speed(report: DataReport) -> Sequence[Setting]:
    """List every setting once: the user's, the best, then the others, the shortest epoch (or highest r) first."""
    others = sorted(report.settings, key=lambda s: (s.seconds_per_epoch is None, s.seconds_per_epoch or 0.0, -s.r))
    return list(dict.fromkeys([report.current, *([report.best] if report.best else []), *others]))


def _visible(text: str) -> str:
    """Make the white space of a blank text visible, and return a sign for an empty one."""
    return text if text.strip() else text.translate(INVISIBLE) or "(nothing)"


def tree_rows(root: TreeNode) -> Iterator[tuple[int, TreeNode, int]]:
    """Yield (depth, run, 0) in pre-order; and (depth, their sum, how many) for the hidden children of each run.

    An empty root with a single child is skipped. Uses a stack, as chains may be deep.
    """
    while not root.num_tokens and len(root.children) == 1 and not root.num_hidden_children:
        root = root.children[0]
    waiting = [(0, root, 0)]
    while waiting:
        depth, node, num_hidden = waiting.pop()
        yield depth, node, num_hidden
        if node.num_hidden_children:
            hidden = TreeNode(text="", num_tokens=node.num_hidden_tokens, num_sequences=node.num_hidden_sequences)
            waiting.append((depth + 1, hidden, node.num_hidden_children))
        waiting += [(depth + 1, child, 0) for child in reversed(node.children)]
