"""What a user types: the list of commands, the version, and bad rows that are skipped. Mistakes: commands/."""

import io
import json
import sys

import pytest

import radixtrain
from radixtrain.__main__ import main
from radixtrain.commands import COMMANDS
from tests.support import cases

ROBOT = {"messages": [{"role": "robot", "content": "x"}]}


def test_without_a_command_and_help(capsys):
    assert main([]) == 2
    assert "usage: python -m radixtrain" in capsys.readouterr().out
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "  fit        fine-tune: python -m radixtrain fit --config configs/sft.yaml"
    assert [line.split()[0] for line in lines[2 : 2 + len(COMMANDS)]] == list(COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"radixtrain {radixtrain.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "meant"), [("fti", ", did you mean fit?"), ("--verify", ", did you mean verify?"), ("--config", ";")]
)
def test_unknown_command(capsys, typed, meant):
    assert main([typed]) == 2
    commands = ", ".join(COMMANDS)
    assert capsys.readouterr().err == f"error: no command {typed!r}{meant} commands: {commands}\n"


@pytest.mark.parametrize("name", cases(COMMANDS, ["fit", "export"]))
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: radixtrain {name} ")


def test_bad_rows_are_reported_and_the_rest_is_trained_on(arguments, shop, tmp_path, caplog):
    lines = (shop / "train.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines[:4], json.dumps(ROBOT), *lines[4:8], "{"]))
    assert main(arguments(data__train_file=path, data__on_bad_row="skip", trainer__max_epochs=1)) == 0
    assert f"skipped {path}:5: messages: turn 1: unknown role" in caplog.text
    assert f"skipped {path}:10: not valid JSON" in caplog.text
    assert (tmp_path / "out" / "model").exists()


def test_a_screen_with_few_characters_and_none(arguments, monkeypatch, tmp_path):
    """As a console of Windows, and a service that closed its output."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    assert main(arguments(trainer__max_steps=1)) == 0
    assert b"loss on what is in ? ?" in out.getvalue()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(arguments(trainer__max_steps=1, output_dir=tmp_path / "closed")) == 0
    assert (tmp_path / "closed" / "model").exists()
