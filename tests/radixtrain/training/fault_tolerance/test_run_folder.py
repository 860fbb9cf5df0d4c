"""Folders with and without a run, and one run that takes the place of another, killed at any moment."""

import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from killed_in_a_fork import kills_at_file_operations

from radixtrain.checkpoints.atomic import WRITTEN, writing_file
from radixtrain.errors import UserError
from radixtrain.training.fault_tolerance.run_folder import (
    ASIDE,
    MOVING,
    EarlierRun,
    check_new_run,
    check_output_dir,
    is_resumed,
    locked,
    locked_model,
    logs_of_run,
)


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_as_a_run(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_file(path) as partial:
        partial.write_text(text)


def checkpoint(output_dir: Path, step: int, text: str) -> None:
    for name in ("manifest.json", "state.json"):
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

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("s3://bucket/run", "output_dir s3://bucket/run: s3 is not supported; name a local folder"),
            ("s3:/bucket", "s3 is not supported"),
            ("file:///tmp/x", "file is not supported"),
            ("", "output_dir"),
            ("a\0b", "output_dir"),
            ("file", "is not a folder"),
            ("file/run", "is not a folder"),
            ("broken/run", "is not a folder"),
        ],
    )
    def test_refused(self, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        (tmp_path / "broken").symlink_to("nowhere")
        with pytest.raises(UserError, match=said):
            check_output_dir(text)

    def test_not_writable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(UserError, match=f"{tmp_path} cannot be written to"):
            check_output_dir(tmp_path / "run" / "a")

    def test_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for text in ("runs/sft", "C:/x", "a:b/c", ".", "run 1", "a//b", "/tmp"):
            assert check_output_dir(text) == Path(text)
        assert not list(tmp_path.iterdir())


class TestNewRun:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("checkpoints/step=3/manifest.json", "checkpoints/"),
            ("checkpoints/mine/manifest.json", "checkpoints/"),
            ("model/config.json", "model/"),
            ("logs/version_0/metrics.csv", "logs/"),
        ],
    )
    def test_another_run(self, name: str, said: str, tmp_path: Path) -> None:
        write(tmp_path / name, "epoch,loss,step\n")
        for beside in ("state.json", "fit.yaml"):
            write_as_a_run((tmp_path / name).with_name(beside))
        way_out = "replace" if said == "model/" else "resume it with --ckpt_path auto"
        with pytest.raises(UserError, match=rf"holds another run \({said}\); {way_out}"):
            check_new_run(tmp_path, None, overwrite=False)
        with pytest.raises(UserError, match="holds another run") if said == "model/" else nullcontext():
            check_new_run(tmp_path, "auto", overwrite=False)
        with pytest.raises(UserError, match="ckpt_path auto resumes and never replaces a run"):
            check_new_run(tmp_path, "auto", overwrite=True)
        check_new_run(tmp_path, None, overwrite=True)
        check_new_run(tmp_path, "last", overwrite=False)
        check_new_run(tmp_path, tmp_path / "checkpoints" / "step=3", overwrite=False)
        with pytest.raises(UserError, match="holds another run"):
            check_new_run(tmp_path, tmp_path.parent / "elsewhere", overwrite=False)

    def test_no_run(self, tmp_path: Path) -> None:
        """No folder, files of the user, leftovers, and what `validate` logs."""
        check_new_run(tmp_path / "absent", None, overwrite=False)
        foreign(tmp_path)
        for name in ("answers/step=1.csv", "config.yaml", "checkpoints/.step=3.partial/manifest.json"):
            write(tmp_path / name)
        write(tmp_path / "checkpoints" / "step=3" / "model.safetensors")
        write(tmp_path / "logs" / "version_0" / "metrics.csv", "epoch,eval_loss,step\n0,1.5,0\n")
        write_as_a_run(tmp_path / "logs" / "version_0" / "validate.yaml")
        check_new_run(tmp_path, None, overwrite=False)

    @pytest.mark.parametrize("name", ["loss.png", "summary.json"])
    def test_a_file_of_the_user_where_every_run_writes(self, name: str, tmp_path: Path) -> None:
        run(tmp_path / "run")
        check_new_run(tmp_path / "run", None, overwrite=True)
        write(tmp_path / name, "mine")
        for ckpt_path, overwrite in ((None, False), (None, True), ("auto", False)):
            with pytest.raises(UserError, match=f"{name} is there and radixtrain did not write it: move it away"):
                check_new_run(tmp_path, ckpt_path, overwrite=overwrite)


OF_THE_USER = (
    *FOREIGN,
    *("answers/answers.csv", "answers/step=9.csv", "logs/version_0/metrics.csv", "logs/version_1/notes", "fit.yaml"),
    *("checkpoints/.notes.md", "checkpoints/app/manifest.json", "checkpoints/best/x"),
)


class TestEarlierRun:
    def test_files_that_no_run_wrote_are_never_set_aside(self, tmp_path: Path) -> None:
        """They have names that a run uses, with columns that a run logs."""
        for name in OF_THE_USER:
            write(tmp_path / name, "step,loss\n1,2")
        before = contents(tmp_path)
        check_new_run(tmp_path, None, overwrite=False)
        with EarlierRun(tmp_path):
            assert contents(tmp_path) == before
        assert contents(tmp_path) == before

    def test_an_end_without_checkpoints_deletes_it(self, tmp_path: Path) -> None:
        run(tmp_path)
        with EarlierRun(tmp_path):
            write(tmp_path / "model" / "config.json", "new")
        assert contents(tmp_path) == {"model/config.json": "new"}


class TestLogsOfRun:
    """What a run that never begins has logged is removed, and nothing that another program wrote meanwhile."""

    @staticmethod
    def logged(folder: Path) -> None:
        for name in ("metrics.csv", "hparams.yaml", f"events.out.tfevents.1.host.{os.getpid()}.0"):
            write(folder / name)

    def test_of_a_run_that_is_refused(self, tmp_path: Path) -> None:
        """A folder of its own goes; a link in it stays what it is, and does not hide the error."""
        write(tmp_path / "run" / "lock")
        write(tmp_path / "elsewhere" / "data.jsonl")
        folder = tmp_path / "run" / "logs" / "version_0"
        for link in ("", "hparams.yaml", "latest"):
            with pytest.raises(UserError, match="refused"), logs_of_run([folder], lambda: False):
                self.logged(folder)
                if link:
                    (folder / link).unlink(missing_ok=True)
                    (folder / link).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
                raise UserError("refused")
            assert not (folder / "metrics.csv").exists() and folder.exists() == (link == "latest")
        assert (tmp_path / "elsewhere" / "data.jsonl").exists()

    def test_the_folder_of_the_run_itself(self, tmp_path: Path) -> None:
        """As `CSVLogger(save_dir, name="", version="")` has it. Nothing was left to do, so the model was exported."""
        write(tmp_path / "metrics.csv", "of the run before")
        with logs_of_run([tmp_path], lambda: False):
            self.logged(tmp_path)
            write(tmp_path / "model" / "model.safetensors")
            write(tmp_path / "events.out.tfevents.1.host.1.0")  # of another process
        kept = {"metrics.csv", "model/model.safetensors", "events.out.tfevents.1.host.1.0"}
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_killed_while_it_is_set_aside(tmp_path: Path) -> None:
    """The next start finds all of it again."""
    run(tmp_path)
    before = contents(tmp_path)
    for _ in kills_at_file_operations(EarlierRun(tmp_path).__enter__):
        check_new_run(tmp_path, "last", overwrite=False)
        assert contents(tmp_path) == before


def test_killed_while_it_is_put_back(tmp_path: Path) -> None:
    """The next start goes on where the one before was killed."""
    run(tmp_path)
    before = contents(tmp_path)
    EarlierRun(tmp_path).__enter__()
    for _ in kills_at_file_operations(lambda: check_new_run(tmp_path, "last", overwrite=False)):
        check_new_run(tmp_path, "last", overwrite=False)
        assert contents(tmp_path) == before
        assert not (tmp_path / ASIDE).exists() and not (tmp_path / MOVING).exists()
        EarlierRun(tmp_path).__enter__()


def test_killed_after_the_first_checkpoint(tmp_path: Path) -> None:
    """The earlier run is deleted, now or by the next start."""

    def begin() -> EarlierRun:
        run(tmp_path)
        earlier = EarlierRun(tmp_path).__enter__()
        checkpoint(tmp_path, 1, "new")
        return earlier

    earlier = [begin()]
    for _ in kills_at_file_operations(lambda: earlier[0].forget()):
        check_new_run(tmp_path, "last", overwrite=False)
        assert contents(tmp_path) == {
            "checkpoints/last": "step=1",
            "checkpoints/step=1/manifest.json": "new",
            "checkpoints/step=1/state.json": "new",
        }
        shutil.rmtree(tmp_path)
        earlier[0] = begin()


def test_wherever_in_its_folder_the_checkpoint_of_a_run_is(tmp_path: Path) -> None:
    run(tmp_path)
    write(tmp_path / "mine" / "x" / "manifest.json")
    for given in ("", "checkpoints", "checkpoints/last", "mine/x"):
        assert is_resumed(tmp_path, tmp_path / given)


def test_a_run_in_a_folder_below_is_another_one(tmp_path: Path) -> None:
    """To go on from it in the folder above would prune the checkpoints of the run there."""
    run(tmp_path)
    run(tmp_path / "inner")
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
