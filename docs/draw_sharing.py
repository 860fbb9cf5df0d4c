"""Draw docs/sharing.svg: a small batch as trainers compute it, row by row, and as one tree of unique tokens.

docs/sharing-narrow.svg has the same for small screens, one below the other.

    python docs/draw_sharing.py

A word stands for a token. Which of them are copies, the tree and the counts come from `build_prefix_plan`.
"""

import argparse
from collections.abc import Iterator
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from radixtrain import PrefixPlan, build_prefix_plan

FOLDER = Path(__file__).resolve().parent

PROMPT = "Name the right team . Mail :"
ROWS = [
    "order late A",
    "order torn B",
    "order lost A",
    "bill wrong C",
    "bill twice C",
    "bill unpaid C",
    "lamp dark D",
    "lamp bent B",
    "lamp loose D",
]

EDGE = 22
TOP, PITCH, TALL = 88, 29, 22  # top of the first row; from row to row; height of a token
LETTER, AROUND, BETWEEN = 7.25, 8, 3  # width of a letter; what surrounds a word; from token to token
FORK = 23  # from a branch point to its branches


class Canvas(NamedTuple):
    """width, height: of the picture. tree: where its half begins, (x, y)."""

    width: int
    height: int
    tree: tuple[int, int]


PICTURES = {"sharing.svg": Canvas(820, 414, (418, 0)), "sharing-narrow.svg": Canvas(432, 776, (EDGE, 350))}

# A fill and the colour of the letters on it. A level of the tree has one colour in both halves; answers are trained.
LIGHT = {
    "card": "#ffffff #16222e",
    "quiet": "#cdd6df #5a6876",
    "copy": "#eef1f4 #8d99a5",
    "answer": "#f4a63a #3a2100",
    "level0": "#2463c2 #ffffff",
    "level1": "#b4e0d5 #0b473d",
    "level2": "#e3efbf #34460c",
}
DARK = {
    "card": "#10171e #eaf0f6",
    "quiet": "#33414e #9ba9b7",
    "copy": "#1b242c #73808d",
    "answer": "#f0a035 #2c1900",
    "level0": "#3c82e4 #ffffff",
    "level1": "#17695b #e4fcf6",
    "level2": "#46591c #f5fbdc",
}
FONTS = """\
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; text-anchor: middle }
.title, .note, .sum { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
.title, .note { text-anchor: start } .title { font-size: 17px; font-weight: 600 } .note { font-size: 13px }
.sum { font-size: 15px } .copy text { text-decoration: line-through } path { fill: none; stroke-width: 1.5 }"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name, canvas in PICTURES.items():
        (folder / name).write_text(draw(canvas), encoding="utf-8")


def draw(canvas: Canvas) -> str:
    """The picture as SVG."""
    rows = [f"{PROMPT} {row}".split() for row in ROWS]
    words = [word for row in rows for word in row]
    plan = plan_of(rows)
    counts = (
        f"T = {plan.num_tokens} tokens become U = {plan.num_unique_tokens}: r = T / U = {plan.compression_ratio:.1f}"
    )
    width, height, (x, y) = canvas
    summary = [f"{counts}.", "The gradient is the same."]
    if x > EDGE:  # both halves in one row, and both sentences in one line
        summary = [" ".join(summary)]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{counts}</title>",
        f"<style>\n{FONTS}\n{style_of(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{style_of(DARK)}\n}}\n</style>",
        f'<g class="card"><rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/></g>',
        *heading("What trainers compute", f"{plan.num_tokens} tokens: the prompt again in every row"),
        *draw_rows(words, plan),
        f'<g transform="translate({x - EDGE} {y})">',
        *heading("What radixtrain computes", f"{plan.num_unique_tokens} tokens: one trunk and its branches"),
        *draw_tree(words, plan),
        "</g>",
        *(text("sum", width / 2, height - 24 * up, line) for up, line in enumerate(reversed(summary), 1)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def plan_of(rows: list[list[str]]) -> PrefixPlan:
    """Words numbered in order of appearance, so that the plan keeps the order of the rows."""
    words = [word for row in rows for word in row]
    number = {word: index for index, word in enumerate(dict.fromkeys(words))}
    plan = build_prefix_plan([number[word] for word in words], [0, *accumulate(map(len, rows))])
    assert plan.path_sequences.tolist() == list(range(len(rows))), "the branches would cross"
    return plan


def heading(title: str, note: str) -> Iterator[str]:
    yield text("title", EDGE, 40, title)
    yield text("note", EDGE, 62, note)


def draw_rows(words: list[str], plan: PrefixPlan) -> Iterator[str]:
    """Every token of every row, struck out if an earlier row has computed it."""
    kept = set(plan.gather_indices.tolist())
    for number, (start, end) in enumerate(zip(plan.cu_seqlens[:-1], plan.cu_seqlens[1:], strict=True)):
        x = float(EDGE)
        for token in range(start, end):
            name = class_of(plan.inverse_indices[token], plan) if token in kept else "copy"
            yield box(name, x, middle_of(number), words[token])
            x += width_of(words[token]) + BETWEEN


def draw_tree(words: list[str], plan: PrefixPlan) -> Iterator[str]:
    """Every unique row once: a segment continues its parent, halfway up the rows that contain it."""
    ends: list[tuple[float, float]] = []  # where each segment ends
    for segment, parent in enumerate(plan.segment_parents):
        first, end = plan.segment_starts[segment : segment + 2]
        holders = [row for row in range(plan.num_sequences) if first in rows_of(row, plan)]
        x, y = float(EDGE), sum(map(middle_of, holders)) / len(holders)
        if parent >= 0:
            start, height = ends[parent]
            yield fork(start, height, y)
            x = start + FORK
        for row in range(first, end):
            word = words[plan.gather_indices[row]]
            yield box(class_of(row, plan), x, y, word)
            x += width_of(word) + BETWEEN
        ends.append((x - BETWEEN, y))


def rows_of(sequence: int, plan: PrefixPlan) -> list[int]:
    """The unique rows of a sequence."""
    start, end = plan.cu_seqlens[sequence : sequence + 2]
    return plan.inverse_indices[start:end].tolist()


def class_of(row: int, plan: PrefixPlan) -> str:
    """`answer` for the last row of a sequence, for every other one the level of its segment."""
    if any(rows_of(sequence, plan)[-1] == row for sequence in range(plan.num_sequences)):
        return "answer"
    segment, level = int(plan.segment_starts.searchsorted(row, side="right")) - 1, 0
    while (segment := int(plan.segment_parents[segment])) >= 0:
        level += 1
    return f"level{level}"


def middle_of(number: int) -> float:
    """The height at which a row's tokens are centred."""
    return TOP + number * PITCH + TALL / 2


def width_of(word: str) -> float:
    return len(word) * LETTER + AROUND


def box(name: str, x: float, y: float, word: str) -> str:
    """A token: its word on a rounded box, from `x` on and centred at `y`."""
    width = width_of(word)
    shape = f'<rect x="{x:g}" y="{y - TALL / 2:g}" width="{width:g}" height="{TALL}" rx="4"/>'
    return f'<g class="{name}">{shape}<text x="{x + width / 2:g}" y="{y + 4:g}">{escape(word)}</text></g>'


def fork(x: float, y: float, target: float) -> str:
    """A curve from the end of a segment to the start of one that continues it."""
    half = x + FORK / 2
    return f'<g class="quiet"><path d="M{x:g} {y:g}C{half:g} {y:g} {half:g} {target:g} {x + FORK:g} {target:g}"/></g>'


def text(name: str, x: float, y: float, words: str) -> str:
    return f'<g class="card"><text class="{name}" x="{x:g}" y="{y:g}">{escape(words)}</text></g>'


def style_of(palette: dict[str, str]) -> str:
    """Rules for boxes, letters and curves of every class of a palette."""
    colours = {name: both.split() for name, both in palette.items()}
    rules = [f".{name} rect {{ fill: {fill} }} .{name} text {{ fill: {ink} }}" for name, (fill, ink) in colours.items()]
    line, ink = colours["quiet"]
    return "\n".join(
        [*rules, f".card .note {{ fill: {ink} }} .card rect {{ stroke: {line} }} path {{ stroke: {ink} }}"]
    )


if __name__ == "__main__":
    main()
