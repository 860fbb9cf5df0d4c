"""What was typed as a password or a token is in no file of a run, and yet reaches the class that it is meant for."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiers import FULL

from radixtrain.__main__ import main

LOGGERS = "lightning.pytorch.loggers"
SECRET = "Zq7secretZq7"  # part of every secret of these runs, and of nothing else
KEY = f"{SECRET}{'0123456789abcdef' * 2}"  # as long as Weights & Biases wants one
LOGGED = {"db_password": SECRET, "nested": {"access_token": SECRET}, "harmless": "kept"}


@pytest.fixture
def config(shop: Path, tmp_path: Path) -> Path:
    """A configuration with a secret wherever a class may get one."""
    wandb = {"save_dir": str(tmp_path / "out"), "offline": True, "project": "p"}
    notes = {"config": LOGGED, "notes": f"hf_{SECRET}{'a' * 20}", "settings": {"api_key": KEY}}
    settings = {
        "model": {"model_name_or_path": str(shop / "model")},
        "data": {"train_file": str(shop / "train.jsonl")},
        "trainer": {
            "logger": [
                {"class_path": f"{LOGGERS}.WandbLogger", "init_args": {**wandb, **notes}},
                {"class_path": f"{LOGGERS}.CSVLogger", "init_args": {"save_dir": str(tmp_path / "out"), "name": "csv"}},
            ]
        },
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def holding(folder: Path) -> list[str]:
    """The files whose name or content has the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [str(path) for path in files if SECRET in str(path) or SECRET.encode() in path.read_bytes()]


def run(
    arguments: Callable[..., list[str]], config: Path, monkeypatch: pytest.MonkeyPatch, command: str, *own: str
) -> int:
    kept = {"model__model_name_or_path": None, "data__train_file": None, "trainer__max_epochs": 1}
    logger = {"save_dir": str(config.parent / "out"), "name": f"hf_{SECRET}{'a' * 20}"}
    added = {"class_path": f"{LOGGERS}.CSVLogger", "init_args": logger}
    loggers = [*yaml.safe_load(config.read_text(encoding="utf-8"))["trainer"]["logger"], added]
    argv = [
        command,
        f"--config={config}",
        *arguments(command, **kept)[1:],
        f"--trainer.logger={json.dumps(loggers)}",
        *own,
    ]
    monkeypatch.setattr(sys, "argv", ["radixtrain", *argv])
    return main(argv)


@FULL
@pytest.mark.usefixtures("wandb_offline")
def test_no_file_of_a_run_has_it(
    arguments: Callable[..., list[str]], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: dict[str, Any] = {}
    wandb: Any = import_module("wandb")
    monkeypatch.setattr(wandb, "init", _noting(wandb.init, got))
    assert run(arguments, config, monkeypatch, "fit") == 0
    assert got["settings"]["api_key"] == KEY and got["config"]["harmless"] == "kept"
    wandb.finish()
    assert not holding(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").rglob("*")}
    assert {"fit.yaml", "hparams.yaml", "state.json", "README.md", "radixtrain.yaml", "metrics.csv"} <= names
    assert any(name.endswith(".wandb") for name in names)


def test_the_settings_of_a_run_ask_for_it_again(
    arguments: Callable[..., list[str]], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.yaml"
    saved.write_text(config.read_text().replace(KEY, "'***'"), encoding="utf-8")
    assert main(["fit", f"--config={saved}"]) == 1
    assert "trainer.logger.init_args.settings.api_key is ***" in capsys.readouterr().err


@FULL
def test_the_report_has_it_neither(
    arguments: Callable[..., list[str]], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(arguments, config, monkeypatch, "report", "--max_seconds=2") == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert SECRET not in page and "--trainer.logger=" in page


ADDRESS = f"https://me:{SECRET}@example.com/x"
NUMBER = "70255170255"
MESSAGES = (
    f"--config={ADDRESS}.yaml",
    ADDRESS,
    f"--{ADDRESS}=1",
    f"--output_dir={ADDRESS}",
    f"--model.model_name_or_path={ADDRESS}",
    f"--data.train_file={ADDRESS}.jsonl",
    f"--ckpt_path={ADDRESS}",
    f"--seed_everything=hf_{SECRET}{'a' * 20}",
    f"--data.batch_size={{password: {SECRET}}}",
    f"--trainer.plugins={{api_key: {NUMBER}}}",
    f"--trainer.plugins={{x: [{{session_id: {SECRET}, y: 1}}]}}",
    f"--data.chat_template_kwargs={{api_key: {SECRET}",
    f"--data.dataset_num_proc=Basic {SECRET}==",
)


def test_no_message_has_it(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for typed in MESSAGES:
        assert main([*arguments(), typed]) in (1, 2), typed
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert SECRET not in line and NUMBER not in line, line


def _noting(function: Callable[..., Any], got: dict[str, Any]) -> Callable[..., Any]:
    """The function, which now notes its keywords."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        got.update(kwargs)
        return function(*args, **kwargs)

    return noting
