"""Folders with and without a run, and one run that takes the place of another, killed at any moment."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.errors import UserError
from radixtrain.training.survival.run_folder import (
    ASIDE,
    MOVING,
    EarlierRun,
    check_new_run,
    check_output_dir,
    is_resumed,
    logs_of_run,
)


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def checkpoint(output_dir: Path, step: int, text: str) -> None:
    write(output_dir / "checkpoints" / f"step={step}" / "manifest.json", text)
    last = output_dir / "checkpoints" / "last"
    last.unlink(missing_ok=True)
    last.symlink_to(f"step={step}")


def run(output_dir: Path, text: str = "old") -> None:
    """What `fit` leaves."""
    checkpoint(output_dir, 5, text)
    checkpoint(output_dir, 9, text)
    write(output_dir / "model" / "config.json", text)
    write(output_dir / "logs" / "version_0" / "metrics.csv", f"step,loss\n1,{text}")
    write(output_dir / "answers" / "step=9.csv", text)
    write(output_dir / "loss.png", text)


FOREIGN = ("train.jsonl", "checkpoints/notes.txt", "logs/mine/x", "predictions.jsonl", "report.html")


def foreign(output_dir: Path) -> None:
    for name in FOREIGN:
        write(output_dir / name, "mine")


def contents(folder: Path) -> dict[str, str]:
    """The texts of files and the targets of links."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    links = {name: os.readlink(path) for name, path in paths.items() if path.is_symlink()}
    return links | {name: path.read_text() for name, path in paths.items() if path.is_file()}


class TestOutputDir:
    def test_a_tilde_is_the_home_for_all_that_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lightning writes its logs there, and the rest of a run has to be beside them."""
        monkeypatch.setenv("HOME", str(tmp_path))
        assert check_output_dir("~/run") == tmp_path / "run"

    @pytest.mark.parametrize("text", ["s3://bucket/run", "gs://b", "hf://datasets/x", "s3:/bucket", "file:///tmp/x"])
    def test_urls(self, text: str) -> None:
        scheme = text.partition(":")[0]
        with pytest.raises(UserError, match=f"output_dir {text}: {scheme} is not supported; name a local folder"):
            check_output_dir(text)

    @pytest.mark.parametrize("text", ["", "  ", "a\0b"])
    def test_no_names(self, text: str) -> None:
        with pytest.raises(UserError, match="output_dir"):
            check_output_dir(text)

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "broken").symlink_to("nowhere")
        for text in ("file", "file/run", "broken/run"):
            with pytest.raises(UserError, match="is not a folder"):
                check_output_dir(str(tmp_path / text))

    def test_not_writable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(UserError, match=f"{tmp_path} cannot be written to"):
            check_output_dir(tmp_path / "run" / "a")

    @pytest.mark.parametrize("text", ["runs/sft", "C:/x", "a:b/c", ".", "run 1", "a//b", "/tmp"])
    def test_folders(self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert check_output_dir(text) == Path(text)
        assert not list(tmp_path.iterdir())


class TestNewRun:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("checkpoints/step=3/manifest.json", "checkpoints/"),
            ("checkpoints/mine/manifest.json", "checkpoints/"),
            ("checkpoints/last.ckpt", "checkpoints/"),
            ("model/config.json", "model/"),
            ("logs/version_0/metrics.csv", "logs/"),
            ("hpc_ckpt_1.ckpt", "hpc_ckpt_1.ckpt"),
        ],
    )
    def test_another_run(self, name: str, said: str, tmp_path: Path) -> None:
        write(tmp_path / name, "epoch,loss,step\n")
        with pytest.raises(UserError, match=rf"holds another run \({said}\); go on from it with --ckpt_path last"):
            check_new_run(tmp_path, None, overwrite=False)
        check_new_run(tmp_path, None, overwrite=True)
        check_new_run(tmp_path, "last", overwrite=False)
        check_new_run(tmp_path, tmp_path / "checkpoints" / "step=3", overwrite=False)
        with pytest.raises(UserError, match="holds another run"):
            check_new_run(tmp_path, tmp_path.parent / "elsewhere", overwrite=False)

    @pytest.mark.parametrize(
        "name",
        [
            *FOREIGN,
            "answers/step=1.csv",
            "config.yaml",
            "checkpoints/.step=3.partial/manifest.json",
            "checkpoints/step=3/model.safetensors",
        ],
    )
    def test_no_run(self, name: str, tmp_path: Path) -> None:
        write(tmp_path / name)
        check_new_run(tmp_path, None, overwrite=False)

    def test_no_folder_and_logs_of_validate(self, tmp_path: Path) -> None:
        check_new_run(tmp_path / "absent", None, overwrite=False)
        write(tmp_path / "logs" / "version_0" / "metrics.csv", "epoch,eval_loss,step\n0,1.5,0\n")
        check_new_run(tmp_path, None, overwrite=False)

    def test_is_resumed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        inside = ["last", "best", tmp_path / "run", "run/checkpoints/step=3", "run/../run/checkpoints"]
        assert all(is_resumed(Path("run"), path) for path in inside)
        assert not any(is_resumed(Path("run"), path) for path in (None, "other/checkpoints", "run2", "."))


class TestEarlierRun:
    def test_the_first_checkpoint_deletes_it(self, tmp_path: Path) -> None:
        run(tmp_path)
        foreign(tmp_path)
        with EarlierRun(tmp_path) as earlier:
            here = {name: text for name, text in contents(tmp_path).items() if not name.startswith(ASIDE)}
            assert here == dict.fromkeys(FOREIGN, "mine")
            checkpoint(tmp_path, 1, "new")
            earlier.forget(tmp_path / "checkpoints" / "step=1")
            assert not (tmp_path / ASIDE).exists()
        new = {"checkpoints/last": "step=1", "checkpoints/step=1/manifest.json": "new"}
        assert contents(tmp_path) == dict.fromkeys(FOREIGN, "mine") | new

    def test_an_error_before_puts_it_back(self, tmp_path: Path) -> None:
        run(tmp_path)
        foreign(tmp_path)
        before = contents(tmp_path)
        with pytest.raises(ZeroDivisionError), EarlierRun(tmp_path):
            write(tmp_path / "logs" / "version_0" / "metrics.csv", "new")
            write(tmp_path / "checkpoints" / ".step=1.partial" / "model.safetensors", "new")
            raise ZeroDivisionError
        after = contents(tmp_path)
        assert after.pop("checkpoints/.step=1.partial/model.safetensors") == "new"  # `tidy` removes those
        assert after == before

    def test_an_end_without_checkpoints_deletes_it(self, tmp_path: Path) -> None:
        run(tmp_path)
        with EarlierRun(tmp_path):
            write(tmp_path / "model" / "config.json", "new")
        assert contents(tmp_path) == {"model/config.json": "new"}

    def test_nothing_to_replace(self, tmp_path: Path) -> None:
        foreign(tmp_path)
        with EarlierRun(tmp_path) as earlier:
            earlier.forget()
        assert contents(tmp_path) == dict.fromkeys(FOREIGN, "mine")

    def test_what_a_run_of_an_older_version_left(self, tmp_path: Path) -> None:
        for name in ("checkpoints/step=3.ckpt", "checkpoints/last.ckpt", "hpc_ckpt_2.ckpt"):
            write(tmp_path / name)
        with EarlierRun(tmp_path):
            pass
        assert not contents(tmp_path)


class TestLogsOfRun:
    """What a run that never begins has logged is removed, and nothing that another program wrote meanwhile."""

    @staticmethod
    def logged(folder: Path) -> None:
        for name in ("metrics.csv", "hparams.yaml", f"events.out.tfevents.1.host.{os.getpid()}.0"):
            write(folder / name)

    def test_a_folder_of_its_own(self, tmp_path: Path) -> None:
        write(tmp_path / "run" / "lock")
        folder = tmp_path / "run" / "logs" / "version_0"
        with pytest.raises(UserError, match="refused"), logs_of_run([folder], lambda: False):
            self.logged(folder)
            raise UserError("refused")
        assert sorted(tmp_path.rglob("*")) == [tmp_path / "run", tmp_path / "run" / "lock"]

    def test_the_folder_of_the_run_itself(self, tmp_path: Path) -> None:
        """As `CSVLogger(save_dir, name="", version="")` has it. Nothing was left to do, so the model was exported."""
        write(tmp_path / "metrics.csv", "of the run before")
        with logs_of_run([tmp_path], lambda: False):
            self.logged(tmp_path)
            write(tmp_path / "model" / "model.safetensors")
            write(tmp_path / "notes.txt")
            write(tmp_path / "events.out.tfevents.1.host.1.0")  # of another process
        kept = {"metrics.csv", "model/model.safetensors", "notes.txt", "events.out.tfevents.1.host.1.0"}
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == kept

    @pytest.mark.parametrize("name", ["latest", "hparams.yaml"])
    def test_a_link_does_not_hide_the_error(self, name: str, tmp_path: Path) -> None:
        target = tmp_path / "elsewhere"
        write(target / "data.jsonl")
        with pytest.raises(UserError, match="refused"), logs_of_run([tmp_path / "logs"], lambda: False):
            self.logged(tmp_path / "logs")
            (tmp_path / "logs" / name).unlink(missing_ok=True)
            (tmp_path / "logs" / name).symlink_to(target, target_is_directory=True)
            raise UserError("refused")
        assert (target / "data.jsonl").exists() and not (tmp_path / "logs" / "metrics.csv").exists()

    def test_a_run_that_has_begun_keeps_them(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt), logs_of_run([tmp_path / "logs"], lambda: True):
            self.logged(tmp_path / "logs")
            raise KeyboardInterrupt
        assert len(list((tmp_path / "logs").iterdir())) == 3


class Killed(BaseException):
    pass


def kill_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let so many renames and deletions happen, then end."""
    left = [count]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return change(*arguments)

        return changed

    patch.setattr(Path, "rename", counted(Path.rename))
    patch.setattr(shutil, "rmtree", counted(shutil.rmtree))


def is_done(count: int, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        kill_after(count, patch)
        try:
            action()
        except Killed:
            return False
        return True


def test_killed_while_it_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start finds all of it again."""
    run(tmp_path)
    before = contents(tmp_path)
    count = 0
    while not is_done(count, EarlierRun(tmp_path).__enter__, monkeypatch):
        check_new_run(tmp_path, "last", overwrite=False)
        assert contents(tmp_path) == before
        count += 1
    assert count == 8  # seven things, and the rename of the folder that holds them


@pytest.mark.parametrize("count", [1, 2, 5])
def test_killed_while_it_is_put_back(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again: each start goes on where the one before was killed."""
    run(tmp_path)
    before = contents(tmp_path)
    EarlierRun(tmp_path).__enter__()
    starts = 1
    while not is_done(count, lambda: check_new_run(tmp_path, "last", overwrite=False), monkeypatch):
        starts += 1
    assert starts > 1 and contents(tmp_path) == before
    assert not (tmp_path / ASIDE).exists() and not (tmp_path / MOVING).exists()


def test_killed_after_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    earlier = EarlierRun(tmp_path).__enter__()
    checkpoint(tmp_path, 1, "new")
    assert not is_done(0, earlier.forget, monkeypatch)
    check_new_run(tmp_path, "last", overwrite=False)
    assert contents(tmp_path) == {"checkpoints/last": "step=1", "checkpoints/step=1/manifest.json": "new"}


@pytest.mark.parametrize("given", ["inner", "inner/checkpoints", "inner/checkpoints/last", "inner/checkpoints/step=5"])
def test_a_run_in_a_folder_below_is_another_one(given: str, tmp_path: Path) -> None:
    """To go on from it in the folder above would prune the checkpoints of the run there."""
    run(tmp_path)
    run(tmp_path / "inner")
    assert not is_resumed(tmp_path, tmp_path / given)
    assert is_resumed(tmp_path / "inner", tmp_path / given)
    with pytest.raises(UserError, match="holds another run"):
        check_new_run(tmp_path, tmp_path / given, overwrite=False)


@pytest.mark.parametrize(
    "given", ["", "checkpoints", "checkpoints/last", "mine/x.ckpt", "logs/version_0/checkpoints/x.ckpt"]
)
def test_wherever_in_its_folder_the_checkpoint_of_a_run_is(given: str, tmp_path: Path) -> None:
    run(tmp_path)
    write(tmp_path / "mine" / "x.ckpt")
    write(tmp_path / "logs" / "version_0" / "checkpoints" / "x.ckpt")
    assert is_resumed(tmp_path, tmp_path / given)
