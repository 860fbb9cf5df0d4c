"""What others put into the folder of a run is neither followed nor deleted: their links and files stay as they are."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main

CHANGES = {"os.rename": 2, "os.remove": 1, "os.truncate": 1, "os.link": 2, "os.symlink": 2}  # paths that it changes
COMMANDS = ("fit", "predict")
LOCKS = (".lock", ".model.lock")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
watching: list[set[str]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event in CHANGES:
        watching[-1].update(map(str, arguments[: CHANGES[event]]))
    elif watching and event == "open" and arguments[2] & WRITING:
        watching[-1].add(str(arguments[0]))


@pytest.fixture
def run(arguments: Callable[..., list[str]], shop: Path) -> Callable[[str, Path], int]:
    own = {"predict": {"data__predict_file": shop / "validation.jsonl"}, "fit": {"trainer__max_epochs": 1}}
    return lambda command, folder: main(arguments(command, output_dir=folder, **own[command]))


def plant(folder: Path, names: list[str], victims: Path) -> list[Path]:
    """A link under each name, to a file of the user's own."""
    victims.mkdir()
    for number, name in enumerate(names):
        (victims / str(number)).write_text("mine")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(victims / str(number))
    return sorted(victims.iterdir())


def test_a_link_under_any_name_that_a_run_writes(
    run: Callable[[str, Path], int], tmp_path: Path, draws: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are those that runs in an empty folder open for writing, rename or delete."""
    sys.addaudithook(_watch)
    watching.append(set())
    assert [run(command, tmp_path / "out") for command in COMMANDS] == [0, 0]
    home, written = str(tmp_path / "out"), watching.pop()
    names = sorted({os.path.relpath(path, home) for path in written if path.startswith(home + os.sep)})
    assert {*LOCKS, ".summary.json.partial", ".loss.png.partial", ".predictions.jsonl.partial"} < {*names}
    whole = ("checkpoints/step=", "model", ".model.replaced", "loss.png", "summary.json", "predictions.jsonl")
    refused = (*LOCKS, *whole)  # each in a line of its own
    planted = [name for name in names if not name.startswith(refused)]
    leaves = [name for name in planted if not any(other.startswith(f"{name}/") for other in planted)]
    victims = plant(tmp_path / "other", leaves, tmp_path / "victims")
    assert [run(command, tmp_path / "other") for command in COMMANDS] == [0, 0], capsys.readouterr().err
    assert [path.read_text() for path in victims] == ["mine"] * len(leaves)


MAKE: dict[str, Callable[[Path, Path], Any]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "folder": lambda path, _: path.mkdir(),
    "file": lambda path, _: path.write_text("mine"),
    "fifo": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("what", MAKE)
def test_what_a_run_would_lock_and_is_not_its_own(
    name: str, what: str, run: Callable[[str, Path], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    MAKE[what](folder / name, victim)
    assert run("fit", folder) == 1
    assert f"{folder / name} is " in capsys.readouterr().err
    assert victim.read_text() == "mine" and os.path.lexists(folder / name)


ODD: dict[str, Callable[[Path], Any]] = {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "pattern",
    [
        *("out/checkpoints/step=*/checksums.txt", "out/checkpoints/step=*/run.json", "out/checkpoints/last"),
        *("out/logs/version_0/metrics.csv", "out/summary.json", "out/loss.png", "out/.radixtrain_files"),
        *("tokens/*/about.json", "tokens/*/samples.arrow", "out/model/README.md", "out/model/config.json"),
    ],
)
def test_no_command_waits_for_a_pipe_or_reads_a_device(
    pattern: str, kind: str, arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    line = arguments(trainer__max_steps=1, trainer__max_epochs=None, data__cache_dir=tmp_path / "tokens")
    assert main(line) == 0
    paths = list(tmp_path.glob(pattern)) or [tmp_path / pattern]
    for path in paths:
        path.unlink(missing_ok=True)
        ODD[kind](path)
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(20)
    try:
        ended = [main([*line, "--ckpt_path=auto"]), main([*line, "--overwrite=true"])]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert set(ended) <= {0, 1}


def _late(*_: object) -> None:
    raise AssertionError("waits")
