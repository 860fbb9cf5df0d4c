"""`loss.png`: which metrics it is drawn from."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from radixtrain.checkpoints.atomic import WRITTEN
from radixtrain.training.results.record import Part, read_curves, write_curves

HEADER = "eval_loss,learning_rate,loss,r,step,tokens_per_second\n"


def part(folder: Path, lines: str, first_step: int = 0) -> Part:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEADER + lines, encoding="utf-8")
    return folder, first_step


def training(steps: range) -> str:
    return "".join(f",1e-05,{3 / (step + 1)},2.0,{step + 1},{1000 + step}\n" for step in steps)


LOSSES = {
    # lines of each part of a run and the step that it goes on from; losses and validations by step
    "steps after a checkpoint are those of the part that goes on from it": (
        [
            (",,1.0,,1,\n2.5,,,,1,\n,,1.0,,2,\n,,1.0,,3,\n9.0,,,,3,\n", 0),
            (",,2.0,,3,\n,,2.0,,4,\n", 2),
            (",,3.0,,3,\n", 1),
        ],
        {1: 1.0, 3: 3.0},
        {1: 2.5},
    ),
    "no points, and a line that was not written to its end": (
        [(",,nan,,1,\n,,,,1,\n,,inf,,1,\n,,oops,,1,\n,,1.0,,,\n,,1.0,,1,", 0)],
        {},
        {},
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_which_points_are_drawn(case: str, tmp_path: Path) -> None:
    """Also if the folder of a part is gone."""
    parts, losses, validations = LOSSES[case]
    given = [part(tmp_path / str(number), *each) for number, each in enumerate(parts)]
    curves = read_curves([(tmp_path / "gone", 0), *given])
    assert (curves.get("loss", {}), curves.get("eval_loss", {})) == (losses, validations)


def test_the_picture(tmp_path: Path) -> None:
    parts = [part(tmp_path / "log", training(range(12)) + "2.5,,,,1,\n"), part(tmp_path / "resumed", "", 12)]
    assert write_curves(parts, tmp_path / "loss.png")
    pixels = imread(tmp_path / "loss.png")
    assert pixels.shape[1] == 1440 and 0.001 < np.mean(pixels[..., :3] < 0.9) < 0.3
    assert sorted(path.name for path in tmp_path.iterdir()) == [WRITTEN, "log", "loss.png", "resumed"]


def test_without_metrics_there_is_none(tmp_path: Path) -> None:
    assert not write_curves([], tmp_path / "loss.png")
    assert not write_curves([part(tmp_path / "log", "2.5,,,,1,\n")], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
