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

BLUE, ORANGE, GREEN, GREY = "#0b559f", "#d1590a", "#1a7f5a", "#777777"  # differ in lightness, for print without colours
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}
PANELS = {  # metric -> title of its panel, and the second metric that is drawn in it
    "learning_rate": ("learning rate", ""),
    "r": ("r: tokens per computed token", "best_r"),
    "tokens_per_second": ("tokens/s", "computed_tokens_per_second"),
}
LABELS = {"best_r": "at best", "tokens_per_second": "effective", "computed_tokens_per_second": "computed"}
FEW = 30  # up to this number of points, each is marked
SMOOTHED = 60  # from this number of points on, a smoothed line is drawn
LOGARITHMIC = 20  # from this ratio of the largest loss to the smallest on, the axis is logarithmic
WINDOW = 1 / 25  # share of the points to average for each point of the smoothed line


class LogPart(NamedTuple):
    """A folder of a CSV logger, and the steps taken before it was begun. A resumed run has several."""

    folder: str
    first_step: int


class BestStep(NamedTuple):
    """The optimizer steps before the best validation by a metric."""

    metric: str
    step: int


class Curve(NamedTuple):
    """A metric over steps. steps: (n,), float64. optimizer steps taken, ascending. values: (n,), float64, finite."""

    steps: np.ndarray
    values: np.ndarray


def write_curves(parts: Sequence[LogPart], path: Path, best: BestStep | None = None) -> bool:
    """Draw the picture, and put it in place once it is whole. Returns False without one if there are no metrics.

    parts: of the run, in order; steps that a later part repeats are taken from that part.
    best: the best validation, which is marked.
    """
    curves = read_curves(parts)
    if not curves.get("loss"):
        return False
    with writing_file(path) as partial:
        _draw(curves, [part.first_step for part in parts[1:]], best, path.absolute().parent.name, partial)
    return True


def read_curves(parts: Sequence[LogPart]) -> dict[str, Curve]:
    """Read the metrics of a run by name: the finite numbers of all complete lines."""
    points: dict[str, array[float]] = {}  # step, value, step, value, ...
    for index, part in enumerate(parts):
        end = min((later.first_step for later in parts[index + 1 :]), default=math.inf)
        for row in _rows(Path(part.folder) / "metrics.csv"):
            step = _number(row.pop("step", None))
            numbers = {name: _number(text) for name, text in row.items()} if step <= end else {}
            for name, value in numbers.items():
                if math.isfinite(value):
                    points.setdefault(name, array("d")).extend((step, value))
    curves = {}
    for name, pairs in points.items():
        steps, values = np.asarray(pairs).reshape(-1, 2)[::-1].T
        steps, indices = np.unique(steps, return_index=True)  # the later of two values of a step
        curves[name] = Curve(steps, values[indices])
    return curves


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            yield from csv.DictReader(line for line in file if line.endswith("\n"))


def _number(text: Any) -> float:
    """Parse a number; NaN for anything else."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _draw(curves: Mapping[str, Curve], resumed: Sequence[int], best: BestStep | None, title: str, path: Path) -> None:
    """Draw the losses in a wide panel above a row of small ones. A dotted line is where the run was resumed.

    Restores Matplotlib's settings.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    validated = sorted(name for name in curves if name.startswith("eval_") and name != "eval_loss")
    small = [*(name for name in PANELS if name in curves), *validated]
    num_columns = 2 if len(small) == 4 else max(1, min(3, len(small)))
    num_rows = -(-len(small) // num_columns)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(9.6, 3.6 + 2.1 * num_rows), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1 + num_rows, num_columns, height_ratios=[1.75, *[1.0] * num_rows])
        losses = figure.add_subplot(grid[0, :], title="loss")
        _plot(losses, curves["loss"], BLUE, "loss")
        if "eval_loss" in curves:
            _plot_validations(losses, "eval_loss", curves, best)
            losses.legend()
        values = np.concatenate([curves[name].values for name in ("loss", "eval_loss") if name in curves])
        if 0 < LOGARITHMIC * values.min() <= values.max():
            losses.set_yscale("log")
            losses.yaxis.set_major_formatter("{x:g}")
        for index, name in enumerate(small):
            panel = figure.add_subplot(grid[1 + index // num_columns, index % num_columns], sharex=losses)
            _draw_small(panel, name, curves, best)
        for index, panel in enumerate(figure.axes):
            panel.xaxis.set_major_locator(MaxNLocator(4 if index else 10, integer=True))
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            panel.set_xlabel("" if 0 < index <= len(small) - num_columns else "optimizer steps")
            for step in resumed:
                panel.axvline(step, color=GREY, linestyle=":", linewidth=1, zorder=0)
        figure.suptitle(title, x=0.012, horizontalalignment="left", fontsize=12, fontweight="bold")
        figure.savefig(path, format="png", dpi=150)


def _draw_small(panel: Axes, name: str, curves: Mapping[str, Curve], best: BestStep | None) -> None:
    title, second = PANELS.get(name, (name, ""))
    panel.set_title(title)
    if name not in PANELS:
        _plot_validations(panel, name, curves, best)
        return
    _plot(panel, curves[name], BLUE, LABELS.get(name, name), is_noisy=name != "learning_rate")
    panel.yaxis.set_major_formatter("{x:g}" if name == "learning_rate" else "{x:,g}")
    if second in curves and not np.array_equal(curves[name].values, curves[second].values):
        _plot(panel, curves[second], GREEN, LABELS[second], "--")
        panel.legend()
    panel.set_ylim(0, 1.04 * panel.get_ylim()[1])


def _plot(panel: Axes, curve: Curve, color: str, label: str, style: str = "-", is_noisy: bool = True) -> None:
    """Plot every point, and through noise a smooth line: the mean over a window, which is narrower at the ends."""
    if len(curve.steps) < SMOOTHED or not is_noisy:
        panel.plot(*curve, style, color=color, label=label, marker="." if len(curve.steps) < FEW else "")
        return
    panel.plot(*curve, style, color=color, alpha=0.3, linewidth=0.8)
    window = np.ones(2 * int(len(curve.values) * WINDOW / 2) + 1)
    sums, counts = (np.convolve(values, window, "same") for values in (curve.values, np.ones_like(curve.values)))
    panel.plot(curve.steps, sums / counts, style, color=color, label=label)


def _plot_validations(panel: Axes, name: str, curves: Mapping[str, Curve], best: BestStep | None) -> None:
    """Plot a point for each validation; the best one is filled, and the panel of its metric names its value."""
    steps, values = curves[name]
    panel.plot(steps, values, "o-", color=ORANGE, label=name, markersize=4, markerfacecolor="white", zorder=3)
    if best is None or best.step not in steps:
        return
    value = float(values[steps == best.step][0])
    panel.plot([best.step], [value], "o", color=ORANGE, markersize=7, zorder=4)
    if name == best.metric:
        panel.set_title(f"best {name}: {value:.4g} at step {best.step:,}", loc="right", color=ORANGE)
