"""Writes results as a table and a picture for people, and as a CSV for programs."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from radixtrain.bench.measure import Measured

# Columns of the CSV: attributes of the model's configuration, of the cell and of the result.
SHAPE_FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
)
CELL_FIELDS = ("sequences", "prompt_length", "suffix_length", "num_sequences", "tree", "mode")
RESULT_FIELDS = (
    *("attention", "num_tokens", "num_unique_tokens", "r", "best_r"),
    *("ideal_speedup", "measured_speedup", "lowest_speedup", "highest_speedup", "efficiency"),
    *("ordinary_seconds", "radix_seconds"),
    *("microseconds_per_unique_token", "ordinary_tokens_per_second", "radix_tokens_per_second"),
    *("ordinary_peak_bytes", "radix_peak_bytes", "memory_ratio", "error"),
)
NOTHING = "-"  # shown for the best r of a step that is not cut
# Columns of the table.
COLUMNS: dict[str, Callable[[Measured], str]] = {
    "model": lambda m: str(m.cell.model),
    "sequences": lambda m: m.cell.sequences,
    "tree": lambda m: m.cell.tree,
    "mode": lambda m: m.cell.mode,
    "attention": lambda m: m.attention,
    "unique\ntokens": lambda m: f"{m.num_unique_tokens:,}",
    "r": lambda m: f"{m.r:.2f}",
    "best\nr": lambda m: NOTHING if m.best_r is None else f"{m.best_r:.2f}",
    "ideal\nspeed-up": lambda m: f"{m.ideal_speedup:.2f}",
    "measured\nspeed-up": lambda m: f"{m.measured_speedup:.2f}",
    "lowest -\nhighest": lambda m: f"{m.lowest_speedup:.2f} - {m.highest_speedup:.2f}",
    "effi-\nciency": lambda m: f"{m.efficiency:.2f}",
    "us/unique\ntoken": lambda m: f"{m.microseconds_per_unique_token:.2f}",
    "tokens/s\nordinary": lambda m: f"{m.ordinary_tokens_per_second:,.0f}",
    "tokens/s\nradix": lambda m: f"{m.radix_tokens_per_second:,.0f}",
    "peak MiB\nordinary": lambda m: _mebibytes(m.ordinary_peak_bytes),
    "peak MiB\nradix": lambda m: _mebibytes(m.radix_peak_bytes),
    "memory\nratio": lambda m: f"{m.memory_ratio:.2f}",
    "worst\nerror": lambda m: f"{m.error:.1e}",
}
NUM_TEXT_COLUMNS = 5  # the first ones, aligned on the left


def print_table(results: Sequence[Measured]) -> None:
    """Print a table, or a block for each result if the terminal is too narrow: no number is ever cut."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write("\n".join(table(results, width)) + "\n")
    sys.stdout.flush()


def table(results: Sequence[Measured], width: int | None = None) -> list[str]:
    """Return the lines of the table, without columns that are empty for every result.

    width: of the terminal, in characters; None if lines may be long.
    """
    shown = {name: [show(measured) for measured in results] for name, show in COLUMNS.items()}
    shown = {name: cells for name, cells in shown.items() if any(cell.strip(NOTHING) for cell in cells)}
    columns = []
    for number, (name, cells) in enumerate(shown.items()):
        titles = name.split("\n")
        entries = [""] * (2 - len(titles)) + titles + cells
        longest = max(map(len, entries))
        columns.append([e.ljust(longest) if number < NUM_TEXT_COLUMNS else e.rjust(longest) for e in entries])
    lines = ["  ".join(entries).rstrip() for entries in zip(*columns, strict=True)]
    return lines if width is None or max(map(len, lines)) <= width else _blocks(shown)


def write_csv(path: Path, results: Iterable[Measured], environment: dict[str, Any]) -> None:
    """Write a line for each result, with the columns of `environment` in each. What was not measured is empty."""
    rows = [{**_row(measured), **environment} for measured in results]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(results: Sequence[Measured], path: Path) -> None:
    """Plot measured against ideal, a point for each result; points on the diagonal reach the ideal."""
    from matplotlib.figure import Figure  # here, since only a benchmark with a picture needs it
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    points = [(m.attention, m.ideal_speedup, m.measured_speedup) for m in results]
    ends = [min(min(point[1:]) for point in points) / 1.2, max(max(point[1:]) for point in points) * 1.2]
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot(ends, ends, color="grey", linewidth=1, label="ideal", zorder=0)
    for strategy in dict.fromkeys(point[0] for point in points):
        axes.scatter(*zip(*(point[1:] for point in points if point[0] == strategy), strict=True), label=strategy)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="ideal speed-up (floating-point operations)", ylabel="measured speed-up", xlim=ends, ylim=ends)
    axes.legend()
    figure.savefig(path)


def _blocks(shown: dict[str, list[str]]) -> list[str]:
    """Write a line for each number, and an empty one after each result."""
    names = [name.replace("-\n", "").replace("\n", " ") for name in shown]
    lines = []
    for cells in zip(*shown.values(), strict=True):
        lines += [f"{name}: {cell}" for name, cell in zip(names, cells, strict=True)] + [""]
    return lines


def _row(measured: Measured) -> dict[str, Any]:
    cell = measured.cell
    fields = ((cell.model.config(), SHAPE_FIELDS), (cell, CELL_FIELDS), (measured, RESULT_FIELDS))
    return {"model": str(cell.model), **{name: getattr(of, name, None) for of, names in fields for name in names}}


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.1f}"
