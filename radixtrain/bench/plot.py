"""The picture of `radixtrain bench`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from radixtrain.bench.measure import Measured

__all__ = ["draw"]


def draw(results: Sequence[Measured], path: Path) -> None:
    """Measured against ideal, a point for each result; points on the diagonal reach the ideal."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    points = [(m.attention, m.ideal_speedup, m.measured_speedup) for m in results if m.measured_speedup is not None]
    ends = [min((min(point[1:]) for point in points), default=1.0) / 1.2]
    ends.append(max((max(point[1:]) for point in points), default=2.0) * 1.2)
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
