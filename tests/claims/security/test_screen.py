"""A terminal obeys no text that is not ours: whatever names it, keys, files, rows, templates, models or checkpoints."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_run
from radixtrain.screen import printable
from tests.support.runs import errors_in, forge, rows_in, write_rows

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ex"
OBEYED = "\x1b\x07\x9b\u202e\r"
Run = Callable[[list[str]], tuple[int, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The exit code of a command and all that it wrote; AssertionError if a terminal would obey a part of it."""

    def run(line: list[str]) -> tuple[int, str]:
        capfd.readouterr()
        code, written = main(line), capfd.readouterr()
        said = written.out + written.err
        assert not set(OBEYED) & set(said), [part for part in said.splitlines() if set(OBEYED) & set(part)]
        assert code == 0 or len(errors_in(said)) == 1
        return code, said

    return run


@pytest.fixture
def evil(shop: Path, tmp_path: Path) -> Path:
    """Rows with a column that nothing reads, in a file with such a name, whose texts have it too."""
    rows = rows_in(shop / "train.jsonl")
    for row in rows:
        row["messages"][-1]["content"] += EVIL
    return write_rows(tmp_path / f"rows{EVIL}.jsonl", ({**row, EVIL: "x"} for row in rows))


def test_what_a_run_says(run: Run, arguments: Callable[..., list[str]], evil: Path, tmp_path: Path) -> None:
    """Of rows and files, of a folder, and of the settings of the run that it goes on from."""
    flags: dict[str, Any] = {"data__train_file": evil, "output_dir": tmp_path / f"out{EVIL}", "trainer__max_epochs": 1}
    code, said = run(arguments(**flags))
    assert code == 0 and "\\x1b]0;owned" in said, said
    code, said = run(arguments("inspect", **{**flags, "trainer__max_epochs": None}, row=1))
    assert code == 0, said
    code, said = run(arguments("report", **flags, max_seconds=0))
    assert code == 0, said
    checkpoint = tmp_path / f"out{EVIL}" / "checkpoints" / "step=5"
    for key in ("model", "data"):
        for name in read_run(checkpoint)[key]:
            if name in ("learning_rate", "min_shared_tokens", "lr_scheduler_type", "kernel", "optimizer"):
                forge(checkpoint, (key, name), EVIL)
                run(arguments(**{**flags, "trainer__max_epochs": 2}, ckpt_path=checkpoint))


def test_what_an_error_says(run: Run, arguments: Callable[..., list[str]], shop: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shop / "model", model)
    template, settings, unknown = tmp_path / "t.jinja", tmp_path / "c.yaml", tmp_path / f"rows.{EVIL}"
    template.write_text("{{ raise_exception(" + json.dumps(f"{EVIL}\nerror: forged") + ") }}")
    settings.write_text(json.dumps({EVIL: {EVIL: 1}}))
    unknown.write_text("x")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": EVIL}))
    for line in (
        arguments(data__chat_template_path=template),
        arguments(config=settings),
        arguments(data__train_file=unknown),
        arguments(model__model_name_or_path=model),
        arguments(data__train_file=tmp_path / EVIL),
        arguments(trainer__logger=EVIL),
        arguments(**{EVIL: 1}),
        [EVIL],
    ):
        code, said = run(line)
        assert code in (1, 2) and ("owned" in said or "forged" in said), said


def test_what_a_library_logs(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has configured its handlers."""
    run(["doctor", f"--{EVIL}"])
    logging.getLogger("some.library").warning("%s", EVIL)
    assert caplog.messages[-1] == printable(EVIL) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202ex"
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("some.library").exception("failed")
    assert f"ValueError: {printable(EVIL)}" in caplog.text
    assert printable("a\tb\nc é 漢 \U0001f600") == "a\tb\nc é 漢 \U0001f600"
