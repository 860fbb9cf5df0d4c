"""`export` of a run, started in another folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main


def test_from_another_folder(
    arguments: Any, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the model was named by a relative path; if it has gone since, the message names where it was."""
    home = tmp_path / "home"
    shutil.copytree(shop / "model", home / "base")
    monkeypatch.chdir(home)
    line = arguments(output_dir="run", model__model_name_or_path="base", trainer__max_steps=1, trainer__max_epochs=None)
    assert main(line) == 0
    export = ["export", f"--ckpt_path={home / 'run'}", "--output_dir"]
    monkeypatch.chdir(tmp_path)
    assert main([*export, "exported"]) == 0
    for settings in tmp_path.rglob("radixtrain.yaml"):
        assert str(tmp_path) not in settings.read_text() and str(shop) not in settings.read_text()
    (home / "base").rename(home / "renamed")
    assert main([*export, "again"]) == 1
    assert f"its tokenizer and configuration are read from {home / 'base'}: no such folder" in capsys.readouterr().err
