"""What a run does beside its result does not end it: links, logs, pictures, answers, and what it deletes.

Once the first checkpoint is in its place, every operation on files of the run's folder is refused that does not write a
checkpoint or the model, as if the rest were read-only or of somebody else.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixtrain import errors
from radixtrain.__main__ import main
from tests.support.runs import assert_same_state, steps_saved

RESULT = re.compile(r"checkpoints/\.step=\d+\.partial(/.*)?|\.model\.partial(/.*)?|checkpoints")
TARGET = re.compile(r"checkpoints/step=\d+|model")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
refused: dict[str, Any] = {}


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    home = refused.get("home")
    if home is None or not event.startswith(("os.", "open")) or not isinstance(arguments[0], str | os.PathLike):
        return
    changed = [arguments[0]] if event in ("os.remove", "os.rmdir", "os.mkdir") else []
    changed += arguments[:2] if event in ("os.rename", "os.symlink") else []
    changed += [arguments[0]] if event == "open" and arguments[2] & WRITING else []
    names = [os.path.relpath(path, home) for path in changed if str(path).startswith(home + os.sep)]
    if event == "os.rename" and names and TARGET.fullmatch(names[-1]):
        refused["has_begun"] = True
    elif event == "os.remove" and not os.path.lexists(arguments[0]):
        return
    elif refused.get("has_begun") and not all(map(RESULT.fullmatch, names)):
        refused["seen"].update(names)
        raise PermissionError(errno.EPERM, "Operation not permitted", names[-1])


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Callable[[], set[str]]]:
    """Call it to begin: returns the names, which grows."""

    def begin() -> set[str]:
        refused.update(home=str(tmp_path / "out"), seen=set(), has_begun=False)
        return refused["seen"]

    sys.addaudithook(_refuse)
    yield begin
    refused.clear()


def test_a_run_whose_other_files_are_refused(
    arguments: Callable[..., list[str]],
    shop: Path,
    tmp_path: Path,
    refusing: Callable[[], set[str]],
    draws: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "_told", set())
    options = {"save_every_steps": 1, "save_total_limit": 1, "save_best": "eval_loss", "trainer__deterministic": "true"}
    rows = {"data__validation_file": shop / "validation.jsonl", "evaluate_generation__metric": "exact_match"}
    rows["evaluate_generation__max_new_tokens"] = 2
    assert main(arguments(**options, **rows)) == 0
    shutil.copytree(tmp_path / "out", tmp_path / "whole", symlinks=True)
    seen = refusing()
    assert main(arguments(**options, **rows, overwrite="true")) == 0
    refused.clear()
    tops = {name.split("/")[0] for name in seen}
    assert {".lock", ".model.lock", ".summary.json.partial", ".loss.png.partial", "answers"} <= tops
    assert {"checkpoints/.last.partial", "checkpoints/.best.partial", "logs/version_0/metrics.csv"} <= seen
    said = [record.getMessage() for record in caplog.records if "Operation not permitted" in record.getMessage()]
    assert len(said) == len({text.split("(")[0] for text in said}) == 9
    out, whole = (tmp_path / name for name in ("out", "whole"))
    assert (out / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert_same_state(*(folder / "checkpoints" / f"step={max(steps_saved(folder))}" for folder in (out, whole)))


def test_logs_that_are_deleted_come_back(
    arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixtrain.training.progress import Speed

    add, calls = Speed.add, list[int]()

    def delete_at_the_third(self: Speed, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            shutil.rmtree(tmp_path / "out" / "logs")
        return add(self, *args)

    monkeypatch.setattr(Speed, "add", delete_at_the_third)
    assert main(arguments()) == 0
    lines = (tmp_path / "out" / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(lines) >= 8
