"""`radixtrain report`: the command on a folder that holds a configuration and a tokenizer, and no weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main

Arguments = Callable[..., list[str]]


@pytest.fixture
def without_weights(shop: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model_only"
    shutil.copytree(shop / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_the_command(
    arguments: Arguments, without_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"model__model_name_or_path": without_weights, "max_seconds": 0.5}
    assert main(arguments("report", **flags)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rows 20, 20 samples" in text, text
    assert "A training step is predicted to run at" in text and "on 1 of 1 layers" in text
    assert "python -m radixtrain fit --output_dir=" in text and "--data.batch_size=4" in text
    page = tmp_path / "out" / "report.html"
    assert str(page) in text and "<html" in page.read_text(encoding="utf-8")[:200]
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html"]


def test_nothing_is_predicted_if_no_time_is_given(
    arguments: Arguments, without_weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments("report", model__model_name_or_path=without_weights, max_seconds=0)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "was not predicted" in text and "max_seconds is 0" in text


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"max_seconds": -1}, "max_seconds must not be negative"),
        ({"data__train_file": None}, "data.train_file is missing"),
        ({"model__model_name_or_path": "no/such/folder"}, "no tokenizer in no/such/folder"),
    ],
)
def test_mistakes(arguments: Arguments, capsys: pytest.CaptureFixture[str], flags: dict[str, Any], error: str) -> None:
    assert main(arguments("report", **flags)) == 1
    captured = capsys.readouterr().err
    assert f"error: {error}" in captured and "Traceback" not in captured
