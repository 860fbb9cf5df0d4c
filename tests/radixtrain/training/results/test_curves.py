"""`loss.png`: which metrics it is drawn from."""

from pathlib import Path

import numpy as np
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


def test_rows_of_the_log_are_steps(tmp_path: Path) -> None:
    curves = read_curves([part(tmp_path / "log", ",1e-05,4.0,2.0,1,100\n,2e-05,3.0,2.5,2,200\n2.5,,,,2,\n")])
    assert curves["loss"] == {1: 4.0, 2: 3.0}
    assert curves["eval_loss"] == {2: 2.5}


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    """Steps after the checkpoint that the second part goes on from are those of the second part."""
    first = part(tmp_path / "version_0", ",,4.0,,1,\n,,3.0,,2,\n,,9.0,,3,\n,,9.0,,4,\n9.0,,,,4,\n")
    second = part(tmp_path / "version_1", ",,2.0,,3,\n,,1.0,,4,\n", first_step=2)
    curves = read_curves([first, second])
    assert curves["loss"] == {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}
    assert not curves["eval_loss"]


def test_a_run_that_went_back_twice(tmp_path: Path) -> None:
    """The third part goes on from a step before the one that the second went on from."""
    parts = [
        part(tmp_path / "0", ",,1.0,,1,\n,,1.0,,2,\n,,1.0,,3,\n"),
        part(tmp_path / "1", ",,2.0,,3,\n,,2.0,,4,\n", first_step=2),
        part(tmp_path / "2", ",,3.0,,3,\n", first_step=1),
    ]
    assert read_curves(parts)["loss"] == {1: 1.0, 3: 3.0}


def test_what_is_no_point_is_left_out_and_a_folder_that_is_gone(tmp_path: Path) -> None:
    """The last line was not written to its end."""
    for number, lines in enumerate(
        [",,nan,,1,\n", ",,,,1,\n", ",,inf,,1,\n", ",,oops,,1,\n", ",,1.0,,,\n", ",,1.0,,1,"]
    ):
        assert "loss" not in read_curves([part(tmp_path / str(number), lines)])
    kept = part(tmp_path / "version_1", training(range(3, 5)), first_step=3)
    assert min(read_curves([(tmp_path / "version_0", 0), kept])["loss"]) == 4


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
