"""`loss.png`: loss, learning rate, r and tokens per second over the steps of a run, from the metrics of its logger."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from radixtrain.checkpoints.atomic import writing_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BestStep", "Curve", "LogPart", "read_curves", "write_curves"]

BLUE, ORANGE, GREEN, GREY = "#0b559f", "#d1590a", "#1a7f5a", "#777777"  # differ in lightness, for print without colours
LOOK: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
}
SMALL = {  # metric -> title of its panel
    "learning_rate": "learning rate",
    "r": "r: tokens per computed token",
    "tokens_per_second": "tokens/s",
}
SECOND = {"r": "best_r", "tokens_per_second": "computed_tokens_per_second"}  # in the same panel
NAMES = {
    "r": "r",
    "best_r": "at best",
    "tokens_per_second": "effective",
    "computed_tokens_per_second": "computed",
}
FEW = 30  # points up to which each is marked
SMOOTHED = 60  # points from which on a line through the noise is drawn
WINDOW = 1 / 25  # of the points, that one point of that line averages


class LogPart(NamedTuple):
    """A folder of a CSV logger, and the steps that were taken before its first row. A resumed run has several."""

    folder: str
    first_step: int


class BestStep(NamedTuple):
    """The optimizer steps before the best validation by a metric."""

    metric: str
    step: int


class Curve(NamedTuple):
    """steps: (n,), float64. optimizer steps taken, ascending. values: (n,), float64, finite."""

    steps: np.ndarray
    values: np.ndarray


def write_curves(parts: Sequence[LogPart], path: Path, best: BestStep | None = None) -> bool:
    """Draw the picture, and put it in its place once it is whole. False, and no picture, if there are no metrics.

    parts: of the run, in their order; steps that a later part repeats are taken from it.
    best: the best validation, which is marked.
    """
    curves = read_curves(parts)
    if not curves.get("loss"):
        return False
    with writing_file(path) as partial:
        _draw(curves, [part.first_step for part in parts[1:]], best, path.absolute().parent.name, partial)
    return True


def read_curves(parts: Sequence[LogPart]) -> dict[str, Curve]:
    """The metrics of a run by name: the finite numbers of all lines that were written to their end."""
    found: dict[str, array[float]] = {}  # step, value, step, value, ...
    for index, part in enumerate(parts):
        end = min((later.first_step for later in parts[index + 1 :]), default=math.inf)
        for row in _rows(Path(part.folder) / "metrics.csv"):
            step = _number(row.pop("step", None)) + 1  # the logger counts the steps before the one that it logs
            numbers = {name: _number(text) for name, text in row.items()} if step <= end else {}
            for name, value in numbers.items():
                if math.isfinite(value):
                    found.setdefault(name, array("d")).extend((step, value))
    return {name: _curve(points) for name, points in found.items()}


def _curve(points: array[float]) -> Curve:
    """In the order of the steps; of two values of a step the later one."""
    steps, values = np.asarray(points).reshape(-1, 2)[::-1].T
    steps, indices = np.unique(steps, return_index=True)
    return Curve(steps, values[indices])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            yield from csv.DictReader(line for line in file if line.endswith("\n"))


def _number(text: Any) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _draw(curves: Mapping[str, Curve], resumed: Sequence[int], best: BestStep | None, title: str, path: Path) -> None:
    """The losses in a wide panel, and a row of small ones below it. Matplotlib's settings are as before afterwards."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    small = [*(name for name in SMALL if name in curves), *sorted(_other_metrics(curves))]
    num_columns = 2 if len(small) == 4 else max(1, min(3, len(small)))
    num_rows = -(-len(small) // num_columns)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        figure = Figure(figsize=(9.6, 3.6 + 2.1 * num_rows), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1 + num_rows, num_columns, height_ratios=[1.75, *[1.0] * num_rows])
        losses = figure.add_subplot(grid[0, :])
        losses.margins(x=0.01)
        _draw_losses(losses, curves, best)
        for index, name in enumerate(small):
            panel = figure.add_subplot(grid[1 + index // num_columns, index % num_columns], sharex=losses)
            _draw_small(panel, name, curves, best)
        for index, panel in enumerate(figure.axes):
            _draw_steps(panel, resumed, 10 if index == 0 else 4)
            panel.set_xlabel("" if 0 < index <= len(small) - num_columns else "optimizer steps")
        figure.suptitle(title, x=0.012, horizontalalignment="left", fontsize=12, fontweight="bold")
        figure.savefig(path, format="png", dpi=150)


def _other_metrics(curves: Mapping[str, Curve]) -> list[str]:
    """What validations measured besides the loss."""
    return [name for name in curves if name.startswith("eval_") and name != "eval_loss"]


def _draw_losses(panel: Axes, curves: Mapping[str, Curve], best: BestStep | None) -> None:
    panel.set_title("loss")
    lines = {"loss": (curves["loss"], BLUE)}
    _draw_noisy(panel, *lines["loss"])
    if "eval_loss" in curves:
        lines["eval_loss"] = (curves["eval_loss"], ORANGE)
        _draw_validations(panel, "eval_loss", curves, best)
    _name_lines(panel, lines, gap=0.075)


def _draw_small(panel: Axes, name: str, curves: Mapping[str, Curve], best: BestStep | None) -> None:
    panel.set_title(SMALL.get(name, name))
    if name not in SMALL:
        _draw_validations(panel, name, curves, best)
        lowest, highest = curves[name].values.min(), curves[name].values.max()
        if lowest >= 0 > panel.get_ylim()[0]:  # a share of right answers is never below 0
            top = panel.get_ylim()[1] if highest > 0 else 1.0
            panel.set_ylim(-0.04 * top, top)
        return
    _draw_noisy(panel, curves[name], BLUE)
    panel.yaxis.set_major_formatter("{x:g}" if name == "learning_rate" else "{x:,g}")
    second = SECOND.get(name, "")
    is_pair = second in curves and not np.array_equal(curves[name].values, curves[second].values)
    if is_pair:
        _draw_noisy(panel, curves[second], GREEN, "--")
    panel.set_ylim(0, 1.04 * panel.get_ylim()[1])
    if is_pair:
        lines = {NAMES[name]: (curves[name], BLUE), NAMES[second]: (curves[second], GREEN)}
        _name_lines(panel, lines, gap=0.14)


def _draw_noisy(panel: Axes, curve: Curve, color: str, style: str = "-") -> None:
    """Every point, and with many of them a smooth line."""
    many = len(curve.steps) >= SMOOTHED
    marker = "." if len(curve.steps) < FEW else ""
    panel.plot(*curve, style, color=color, alpha=0.3 if many else 1, linewidth=0.8 if many else 1.4, marker=marker)
    if many:
        panel.plot(curve.steps, _smooth(curve.values), style, color=color)


def _draw_validations(panel: Axes, name: str, curves: Mapping[str, Curve], best: BestStep | None) -> None:
    """A point for each validation; the best one is full, and in the panel of its metric its value is said."""
    steps, values = curves[name]
    panel.plot(steps, values, "o-", color=ORANGE, markersize=4, markerfacecolor="white", zorder=3)
    if best is None or best.step not in steps:
        return
    value = float(values[steps == best.step][0])
    panel.plot([best.step], [value], "o", color=ORANGE, markersize=7, zorder=4)
    if name == best.metric:
        panel.set_title(f"best {name}: {value:.4g} at step {best.step:,}", loc="right", color=ORANGE)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean over a window around each point, which is narrower at the ends."""
    half = max(1, int(len(values) * WINDOW / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    indices = np.arange(len(values))
    first, end = np.maximum(indices - half, 0), np.minimum(indices + half + 1, len(values))
    return (sums[end] - sums[first]) / (end - first)


def _name_lines(panel: Axes, lines: Mapping[str, tuple[Curve, str]], gap: float) -> None:
    """The names at the right ends of the lines, so that no legend is needed.

    lines: name -> curve and colour. gap: least distance of two names, as a share of the panel's height.
    """
    bottom, top = panel.get_ylim()
    panel.set_ylim(bottom, top)  # stays as it is
    ends = {name: curve.values[-max(1, int(len(curve.values) * WINDOW)) :].mean() for name, (curve, _) in lines.items()}
    names = sorted(ends, key=lambda each: float(ends[each]))
    heights: list[float] = []
    for name in names:
        height = (ends[name] - bottom) / (top - bottom)
        heights.append(max(height, heights[-1] + gap) if heights else height)
    above = max(0.0, heights[-1] - 1)  # the top one stays beside the panel, not beside its title
    for name, height in zip(names, heights, strict=True):
        place: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (5, 0), "textcoords": "offset points"}
        panel.annotate(name, (1.0, height - above), color=lines[name][1], verticalalignment="center", **place)


def _draw_steps(panel: Axes, resumed: Sequence[int], num_ticks: int) -> None:
    """The axis of the steps, and a dotted line where the run went on."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    panel.xaxis.set_major_locator(MaxNLocator(num_ticks, integer=True))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for step in resumed:
        panel.axvline(step, color=GREY, linestyle=":", linewidth=1, zorder=0)
