"""Locks that a second process holds: one that this test forks. Every pair of commands: `tests/claims/survival`."""

import fcntl
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from radixtrain.errors import UserError
from radixtrain.training.survival.folder_lock import locked, locked_model


@contextmanager
def another(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[int]:
    """Inside, another process is in this context; it is killed on the way out."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with enter():
                os.write(write, b"in")
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 2) == b"in"
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(read)


def refused(enter: AbstractContextManager[None]) -> str:
    with pytest.raises(UserError) as error, enter:
        pytest.fail("it went in")
    return str(error.value)


def test_a_second_command_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with another(lambda: locked(folder, "predict")) as process:
        for _ in range(3):
            message = refused(locked(folder, "fit"))
            assert message.startswith(f"{folder} is in use by `radixtrain predict`, process {process} on ")
            assert message.endswith("; wait until it ends, or set another output_dir")
    with locked(folder, "fit"):
        assert "in use by this process" in refused(locked(folder, "fit"))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["model", "best"])
def test_export(name: str, tmp_path: Path) -> None:
    """A run takes its `model/`; exports into other folders do not disturb it, nor one another."""
    run, target = tmp_path / "run", tmp_path / "run" / name
    with another(lambda: locked(run, "fit")):
        if name == "model":
            assert "in use by `radixtrain fit`" in refused(locked_model(target, "export"))
        else:
            with locked_model(target, "export"):
                pass
    with another(lambda: locked_model(target, "export")):
        assert "in use by `radixtrain export`" in refused(locked_model(target, "export"))
        if name == "model":
            assert "in use by `radixtrain export`" in refused(locked(run, "fit"))


def test_only_what_was_made_and_is_empty_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b", "fit"):
        pass
    assert not (tmp_path / "a").exists()
    (tmp_path / "c").mkdir()
    with locked(tmp_path / "c" / "d", "fit"):
        (tmp_path / "c" / "d" / "file").touch()
    with locked(tmp_path / "c", "report"):
        pass
    assert [path.name for path in (tmp_path / "c").rglob("*")] == ["d", "file"]


def test_a_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A forked process lives on after the one that had the lock."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with locked(tmp_path, "fit"):
            worker = os.fork()
            if worker == 0:
                signal.pause()
            os.write(write, str(worker).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    worker = int(os.read(read, 20))
    try:
        with locked(tmp_path, "fit"):
            os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING), locked(tmp_path, "report"):
        pass
    assert caplog.messages[0] == f"{tmp_path} cannot be locked here (No locks available); start no second command in it"
