"""`push_to_hub` with a hub that is replaced: what is uploaded, and that nothing that goes wrong there loses a model."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.commands import export


class Hub:
    """Of the calls of `HfApi` those that are used."""

    def __init__(self) -> None:
        self.repos: dict[str, bool] = {}
        self.files: dict[str, set[str]] = {}
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> Any:
        assert exist_ok
        self.repos[f"me/{repo_id}" if "/" not in repo_id else repo_id] = private
        return SimpleNamespace(repo_id=list(self.repos)[-1])

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.error:
            raise self.error
        self.files[repo_id] = {path.name for path in folder_path.iterdir()}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Somebody is logged in to it."""
    server = Hub()
    monkeypatch.setattr(export, "HfApi", lambda: server)
    monkeypatch.setattr(export, "get_token", lambda: "hf_none")
    monkeypatch.setattr(export.constants, "HF_HUB_OFFLINE", False)
    return server


def test_a_run_and_an_export_are_uploaded(
    server: Hub, arguments: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the name of the folder, or the given one; private unless turned off. Nothing is lost if it fails."""
    run = tmp_path / "my_run"
    server.error = ConnectionError("no route\nto the hub")
    line = arguments(output_dir=run, trainer__max_steps=1, push_to_hub="true")
    assert main(line) == 0
    (said,) = (record.getMessage() for record in caplog.records if "push_to_hub" in record.getMessage())
    later = f"The model is in {run}/model; upload it with: hf upload my_run {run}/model"
    assert said == f"push_to_hub: not uploaded: no route. {later}" and (run / "model" / "config.json").is_file()
    server.error = None
    assert main([*line, "--ckpt_path=last"]) == 0
    line = ["export", "--ckpt_path", str(run), "--output_dir", str(tmp_path / "model"), "--push_to_hub", "true"]
    assert main([*line, "--hub_model_id", "they/theirs", "--hub_private_repo", "false"]) == 0
    assert server.repos == {"me/my_run": True, "they/theirs": False}
    for files in server.files.values():
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files


def test_what_is_refused_before_training(
    server: Hub, arguments: Any, shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(**flags: Any) -> str:
        assert main(arguments(data__train_file=shop / "none.jsonl", **flags)) == 1
        return capsys.readouterr().err.splitlines()[-1]

    assert "no such file" in says(push_to_hub="true")
    assert "hub_model_id: expected NAME or OWNER/NAME; " in says(push_to_hub="true", hub_model_id="a/b/c")
    assert "hub_model_id a/b: nothing would be uploaded; set push_to_hub: true" in says(hub_model_id="a/b")
    monkeypatch.setattr(export, "get_token", lambda: None)
    assert "not logged in to the Hugging Face hub: run `hf auth login`, or set HF_TOKEN" in says(push_to_hub="true")
    monkeypatch.setattr(export.constants, "HF_HUB_OFFLINE", True)
    assert "push_to_hub: HF_HUB_OFFLINE forbids the upload" in says(push_to_hub="true")


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
