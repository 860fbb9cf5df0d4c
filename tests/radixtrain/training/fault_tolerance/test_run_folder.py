"""Folders with and without a run, and a run that begins where another one is, killed at any moment."""

import errno
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from radixtrain.checkpoints.atomic import WRITTEN, writing_file
from radixtrain.errors import UserError
from radixtrain.training.fault_tolerance.run_folder import (
    LOCK,
    check_new_run,
    check_output_dir,
    check_outside,
    is_resumed,
    locked,
    rename_earlier_run,
)
from tests.support.runs import kills_at_file_operations, names


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_as_a_run(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_file(path) as partial:
        partial.write_text(text)


def checkpoint(output_dir: Path, step: int, text: str) -> None:
    for name in ("checksums.txt", "run.json"):
        write(output_dir / "checkpoints" / f"step={step}" / name, text)
    last = output_dir / "checkpoints" / "last"
    last.unlink(missing_ok=True)
    last.symlink_to(f"step={step}")


def run(output_dir: Path, text: str = "old") -> None:
    """What `fit` leaves."""
    checkpoint(output_dir, 5, text)
    checkpoint(output_dir, 9, text)
    write(output_dir / "model" / "config.json", text)
    write(output_dir / "logs" / "version_0" / "metrics.csv", f"step,loss\n1,{text}")
    for name in ("logs/version_0/fit.yaml", "answers/step=9.csv", "loss.png"):
        write_as_a_run(output_dir / name, text)


FOREIGN = ("train.jsonl", "checkpoints/notes.txt", "logs/mine/x", "predictions.jsonl", "report.html")


def foreign(output_dir: Path) -> None:
    for name in FOREIGN:
        write(output_dir / name, "mine")


def contents(folder: Path) -> dict[str, str]:
    """The texts of files and the targets of links."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    links = {name: os.readlink(path) for name, path in paths.items() if path.is_symlink()}
    return links | {name: path.read_text() for name, path in paths.items() if path.is_file() and path.name != WRITTEN}


class TestOutputDir:
    def test_a_tilde_is_the_home_for_all_that_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lightning writes its logs there, and the rest of a run has to be beside them."""
        monkeypatch.setenv("HOME", str(tmp_path))
        assert check_output_dir("~/run") == tmp_path / "run"


# What is in the folder, ckpt_path, overwrite -> what is said; empty if the run begins or resumes.
SAVED, MODEL, FREE = ("checkpoints/step=3/checksums.txt", "checkpoints/step=3/run.json"), ("model/config.json",), ()
OTHER = r"holds another run \(checkpoints/\); resume it with --ckpt_path auto, keep it under another name with --overwr"
ONE_OF_THEM = "resumes the run in .*, and overwrite begins another one: leave one out"
NEW_RUNS = [
    (FREE, None, False, ""),
    (FREE, None, True, ""),
    (FREE, "auto", False, ""),
    (SAVED, None, False, OTHER),
    (SAVED, "elsewhere", False, OTHER),
    (SAVED, None, True, ""),
    (SAVED, "elsewhere", True, ""),
    (SAVED, "last", False, ""),
    (SAVED, "auto", False, ""),
    (SAVED, "checkpoints/step=3", False, ""),
    (SAVED, "auto", True, ONE_OF_THEM),
    (SAVED, "last", True, ONE_OF_THEM),
    (SAVED, "checkpoints/step=3", True, ONE_OF_THEM),
    (MODEL, None, False, r"holds another run \(model/\); keep it under"),
    (MODEL, "auto", False, r"holds another run \(model/\); keep it under"),
    (MODEL, None, True, ""),
]


class TestNewRun:
    @pytest.mark.parametrize(("names", "ckpt_path", "overwrite", "said"), NEW_RUNS)
    def test_what_begins(
        self, names: tuple[str, ...], ckpt_path: str | None, overwrite: bool, said: str, tmp_path: Path
    ) -> None:
        """Beside files of the user, leftovers, and logs of a run that saved nothing."""
        out = tmp_path / "out"
        foreign(out)
        for name in (*names, "answers/step=1.csv", "checkpoints/.step=4.partial/checksums.txt", "checkpoints/step=5/x"):
            write(out / name)
        write_as_a_run(out / "logs" / "version_0" / "fit.yaml")
        if ckpt_path is not None and ckpt_path not in ("last", "auto"):
            ckpt_path = str((tmp_path if ckpt_path == "elsewhere" else out) / ckpt_path)
        with pytest.raises(UserError, match=said) if said else nullcontext():
            check_new_run(out, ckpt_path, overwrite)

    @pytest.mark.parametrize("name", ["loss.png", "summary.json"])
    def test_a_file_of_the_user_where_every_run_writes(self, name: str, tmp_path: Path) -> None:
        """It is renamed with an earlier run, and in the way without one."""
        write(tmp_path / name, "mine")
        said = f"{name} is there and radixtrain did not write it: move it away"
        for ckpt_path, overwrite in ((None, False), (None, True), ("auto", False)):
            with pytest.raises(UserError, match=said):
                check_new_run(tmp_path, ckpt_path, overwrite=overwrite)
        checkpoint(tmp_path, 5, "old")
        check_new_run(tmp_path, None, overwrite=True)
        with pytest.raises(UserError, match=said):
            check_new_run(tmp_path, "last", overwrite=False)


class TestOverwrite:
    """The earlier run is under its name or the next free one, whole, whatever happens."""

    def test_every_file_is_renamed_and_none_is_deleted(self, tmp_path: Path) -> None:
        for name in ("sft", "sft.1"):
            run(tmp_path / name, name)
        foreign(tmp_path / "sft")
        (tmp_path / "sft.2").symlink_to("nowhere")  # taken as well
        (tmp_path / "link").symlink_to("sft")
        before = contents(tmp_path / "sft")
        with locked(tmp_path / "link", "fit"):
            assert rename_earlier_run(tmp_path / "link") == tmp_path / "sft.3"
            assert (tmp_path / "link" / LOCK).read_text().startswith("`radixtrain fit`")
            with another(lambda: nullcontext()), pytest.raises(UserError, match="in use by this process"):
                locked(tmp_path / "sft", "fit").__enter__()
        assert contents(tmp_path / "sft.3") == before and contents(tmp_path / "sft.1")["loss.png"] == "sft.1"
        assert not contents(tmp_path / "sft") and (tmp_path / "link").resolve() == tmp_path / "sft"

    def test_without_a_run_nothing_is_renamed(self, tmp_path: Path) -> None:
        """Files of the user, with names that a run uses; and a run that saved nothing."""
        for name in (*FOREIGN, "answers/step=9.csv", "logs/version_0/metrics.csv", "checkpoints/best/x"):
            write(tmp_path / "sft" / name, "step,loss\n1,2")
        write_as_a_run(tmp_path / "sft" / "logs" / "version_1" / "fit.yaml")
        before = contents(tmp_path)
        assert rename_earlier_run(tmp_path / "sft") is None
        assert contents(tmp_path) == before

    def test_killed_at_any_moment_and_started_again(self, tmp_path: Path) -> None:
        """With the same command line. A second start without a checkpoint renames nothing."""
        out = tmp_path / "sft"

        def start() -> None:
            with locked(out, "fit"):
                check_new_run(out, None, overwrite=True)
                rename_earlier_run(out)
                write_as_a_run(out / "logs" / "version_0" / "fit.yaml", "new")

        run(out)
        before = contents(out)
        for _ in kills_at_file_operations(start):
            start()
            assert names(tmp_path) == ["sft", "sft.1"]
            assert {name: text for name, text in contents(tmp_path / "sft.1").items() if "lock" not in name} == before
            assert contents(out) == {"logs/version_0/fit.yaml": "new"}
            shutil.rmtree(out)
            (tmp_path / "sft.1").rename(out)
            for lock in out.glob(".*lock"):
                lock.unlink()

    @pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES])
    def test_a_folder_that_cannot_be_renamed(self, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk that is mounted there, and a parent of somebody else."""
        run(tmp_path / "sft")

        def fail(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(Path, "rename", fail)
        said = rf"sft cannot be renamed to sft\.1, .* \({os.strerror(error)}\); set another output_dir"
        with pytest.raises(UserError, match=said):
            rename_earlier_run(tmp_path / "sft")

    def test_what_the_run_reads_is_not_renamed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        out = tmp_path / "sft"
        write(out / "train.jsonl")
        (tmp_path / "link").symlink_to("sft/train.jsonl")
        inside = ("sft/train.jsonl", str(out / "model"), "sft/absent", "link", [str(tmp_path), "sft/train.jsonl"])
        outside = {"data.train_file": str(tmp_path / "train.jsonl"), "model.x": "sft.1/model", "y": "a\0b", "z": 3}
        check_outside(out, {"data.train_file": "sft/train.jsonl"})  # there is no run
        run(out)
        check_outside(out, outside)
        for value in inside:
            with pytest.raises(UserError, match=r"^data.train_file .* is inside of output_dir .*/sft, which overwrite"):
                check_outside(out, {**outside, "data.train_file": value})
        monkeypatch.chdir(out / "logs")
        with pytest.raises(UserError, match=r"^the working directory \. is inside of output_dir"):
            check_outside(out, {})


def test_which_checkpoint_is_of_the_run_in_a_folder(tmp_path: Path) -> None:
    """Wherever it is. To go on from a run in a folder below would prune the checkpoints of the run there."""
    run(tmp_path)
    run(tmp_path / "inner")
    write(tmp_path / "mine" / "x" / "checksums.txt")
    for given in ("", "checkpoints", "checkpoints/last", "mine/x"):
        assert is_resumed(tmp_path, tmp_path / given)
    for given in ("inner", "inner/checkpoints", "inner/checkpoints/last", "inner/checkpoints/step=5"):
        assert not is_resumed(tmp_path, tmp_path / given) and is_resumed(tmp_path / "inner", tmp_path / given)
        with pytest.raises(UserError, match="holds another run"):
            check_new_run(tmp_path, tmp_path / given, overwrite=False)


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
