"""`loss.png`: loss, `eval_loss` and learning rate over the steps of a run, from its CSV logs."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from radixtrain.checkpoints.atomic import writing_file

Part = tuple[Path, int]
"""A folder of a CSV logger, and the steps taken before it was begun. A resumed run has several."""
PANEL = {"loss": 0, "eval_loss": 0, "learning_rate": 1}  # metric -> where it is drawn


def write_curves(parts: Sequence[Part], path: Path) -> bool:
    """Draw the picture, and put it in place once it is whole. Returns False without one if no loss was logged.

    parts: of the run, in order. A dotted line is where the run was resumed.
    """
    curves = read_curves(parts)
    if not curves.get("loss"):
        return False
    from matplotlib.figure import Figure  # here, since it takes a second

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    panels = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    for name, points in curves.items():
        panels[PANEL[name]].plot([*points], [*points.values()], marker=".", markersize=3, label=name)
    for panel in panels:
        panel.legend()
        for _, first_step in parts[1:]:
            panel.axvline(first_step, color="grey", linestyle=":")
    panels[-1].set_xlabel("optimizer steps")
    with writing_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
    return True


def read_curves(parts: Sequence[Part]) -> dict[str, dict[float, float]]:
    """Read the metrics of `PANEL`, each as step to value: the finite numbers of all complete lines.

    Steps that a later part repeats are taken from that part.
    """
    curves: dict[str, dict[float, float]] = {}
    for folder, first_step in parts:
        for name, points in curves.items():
            curves[name] = {step: value for step, value in points.items() if step <= first_step}
        path = folder / "metrics.csv"
        lines = path.read_bytes().decode(errors="replace").split("\n")[:-1] if path.is_file() else []
        for row in csv.DictReader(lines):
            for name in PANEL:
                with suppress(KeyError, TypeError, ValueError):  # no such metric, or a damaged line
                    step, value = float(row["step"]), float(row[name])
                    if math.isfinite(value):
                        curves.setdefault(name, {})[step] = value
    return curves
