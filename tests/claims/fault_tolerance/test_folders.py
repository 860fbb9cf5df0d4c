"""One command at a time in a folder: every pair of those that write there, each in a process of its own; and no copies.

All 36 pairs are tried: one command stops itself as soon as it has its lock, and each of the others says no meanwhile.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from tests.support import FULL
from tests.support.processes import stop_in_lock
from tests.support.runs import EXACT, assert_nothing_left, contents, errors_in

COMMANDS = ("fit", "validate", "test", "predict", "report", "export")
pytestmark = FULL


@pytest.fixture
def line(arguments: Callable[..., list[str]], shop: Path, tmp_path: Path) -> Callable[[str, Path], list[str]]:
    """The command line of each of them, in the folder of a run."""
    rows = {f"data__{name}_file": shop / "validation.jsonl" for name in ("validation", "test", "predict")}
    checkpoint = tmp_path / "before" / "checkpoints" / "last"

    def build(command: str, folder: Path) -> list[str]:
        if command == "export":
            return ["export", f"--ckpt_path={checkpoint}", f"--output_dir={folder / 'model'}"]
        return arguments(command, output_dir=folder, **EXACT, **rows)

    return build


@pytest.fixture
def run_before(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A checkpoint to export."""
    assert main(arguments(output_dir=tmp_path / "before", trainer__max_steps=1)) == 0


def wait_until_stopped(run: Any) -> None:
    while Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert run.is_running, run.said()
        time.sleep(0.002)


@pytest.mark.usefixtures("run_before")
@pytest.mark.parametrize("holder", COMMANDS)
def test_the_second_command_in_a_folder_says_no(start, line, tmp_path, holder, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    run = start(line(holder, folder), before=stop_in_lock)
    wait_until_stopped(run)
    before = contents(folder)
    for command in COMMANDS:
        capsys.readouterr()
        assert main(line(command, folder)) == 1, f"{command} while {holder} runs"
        errors = errors_in(capsys.readouterr().err)
        assert len(errors) == 1 and f"is in use by `radixtrain {holder}`, process {run.pid} on" in errors[0], errors
    assert contents(folder) == before
    run.send(signal.SIGCONT)
    assert run.wait() == 0, run.said()
    assert_nothing_left(folder)
