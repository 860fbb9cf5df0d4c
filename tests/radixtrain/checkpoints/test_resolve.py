"""The newest whole checkpoint, and everything that `--ckpt_path` may name."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from radixtrain.checkpoints.atomic import tidy_leftovers
from radixtrain.checkpoints.folder import CHECKSUMS, MODEL, RUN, write_checkpoint
from radixtrain.checkpoints.resolve import NewestValid, newest_valid, point, prune, resolve
from radixtrain.errors import UserError
from tests.support.runs import names


def damage(path):
    with (path / MODEL).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xaa")


class TestNewest:
    def test_is_the_last_one_written_whatever_its_name(self, folder, made):
        assert newest_valid(folder) == NewestValid(folder / "step=5", [])
        for name in ("step=4", "my best.ckpt"):  # as after going back to an earlier step
            write_checkpoint(folder / name, made(4))
            os.utime(folder / name, (0, 0))
            assert newest_valid(folder) == NewestValid(folder / name, [])

    def test_damaged_ones_are_named(self, folder, made):
        write_checkpoint(folder / "step=7", made(7))
        damage(folder / "step=7")
        (folder / "step=5" / CHECKSUMS).unlink()
        newest = newest_valid(folder)
        assert newest.path == folder / "step=3"
        assert sorted(line.removeprefix(f"{folder}/") for line in newest.passed_over) == [
            "step=5: checksums.txt is missing: writing did not finish",
            "step=7: model.safetensors is damaged: its checksum is not the one in checksums.txt",
        ]
        (folder / "step=3" / RUN).unlink()
        with pytest.raises(UserError, match=r"no whole checkpoint in .*step=3: run\.json is missing.*step=7: model"):
            resolve("last", folder)

    def test_what_is_none(self, folder, made, tmp_path):
        """One that is being written, links, and folders of other things."""
        (tmp_path / "folder" / "logs").mkdir(parents=True)
        assert newest_valid(tmp_path / "folder") == newest_valid(tmp_path / "none") == NewestValid(None, [])
        write_checkpoint(folder / ".step=9.partial", made(9))
        point(folder, "last", folder / "step=3")
        (folder / "nowhere").symlink_to("nothing")
        assert newest_valid(folder) == NewestValid(folder / "step=5", [])

    def test_one_that_was_being_replaced_counts(self, folder):
        (folder / "step=5").rename(folder / ".step=5.replaced")
        assert newest_valid(folder) == NewestValid(folder / ".step=5.replaced", [])
        assert resolve(str(folder / "step=5"), folder) == folder / ".step=5.replaced"


class TestResolve:
    @pytest.fixture(autouse=True, params=["links", "files"])
    def links(self, folder, request, monkeypatch):
        """As links, and as files on disks without links."""

        def refuse(*_):
            raise PermissionError

        if request.param == "files":
            monkeypatch.setattr(Path, "symlink_to", refuse)
        point(folder, "last", folder / "step=5")
        point(folder, "best", folder / "step=3")
        assert (folder / "last").is_symlink() == (request.param == "links")

    @pytest.mark.parametrize("is_relative", [True, False])
    def test_names(self, folder, is_relative, monkeypatch):
        monkeypatch.chdir(folder.parent)
        there = Path("checkpoints") if is_relative else folder
        for text, name in (
            *(("last", "step=5"), ("best", "step=3"), ("{}/last", "step=5"), ("{}/best", "step=3"), ("{}", "step=5")),
            *(("{}/step=3", "step=3"), ("{}/step=3/", "step=3"), ("{}/..", "step=5")),
        ):
            assert resolve(text.format(there), there).resolve() == folder / name, text

    def test_last_is_the_newest_whatever_the_link_says(self, folder, made):
        write_checkpoint(folder / "step=9", made(9))
        for _ in range(2):
            assert resolve("last", folder) == resolve(str(folder / "last"), Path()) == folder / "step=9"
            (folder / "last").unlink(missing_ok=True)

    @pytest.mark.parametrize("text", ["last", "{}/last", "{}", "{}/.."])
    def test_a_newer_one_that_is_damaged_is_passed_over_and_named(self, folder, text, caplog):
        damage(folder / "step=5")
        with caplog.at_level(logging.WARNING, "radixtrain"):
            assert resolve(text.format(folder), folder).resolve() == folder / "step=3"
        (record,) = caplog.records
        assert "step=5: model.safetensors is damaged" in record.getMessage() and "step=3" in record.getMessage()

    @pytest.mark.parametrize("text", ["{}/step=5", "best"])
    def test_a_named_one_is_not_passed_over(self, folder, text):
        point(folder, "best", folder / "step=5")
        damage(folder / "step=5")
        with pytest.raises(UserError, match=r"step=5: model\.safetensors is damaged.*; .*step=3 is whole"):
            resolve(text.format(folder), folder)

    def test_none_is_there(self, folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / MODEL).write_text("x")
        (folder / "empty").mkdir()
        shutil.rmtree(folder / "step=3")  # where the link `best` leads
        for text, reason in (
            ("best", r"none in .*save_best.*; .*step=5 is whole"),
            ("{}/step=4", "no such checkpoint: .*step=4; .*step=5 is whole"),
            ("nope.ckpt", "no such checkpoint: nope.ckpt$"),
            ("{}/step=5/model.safetensors", "a file; a checkpoint of radixtrain is a folder"),
            ("{}/model", "a model, not a checkpoint; give it as model.model_name_or_path"),
            ("{}/empty", "no whole checkpoint in .*empty; --ckpt_path auto starts"),
            ("{}/empty/last", "no whole checkpoint in .*empty; --ckpt_path auto starts"),
            ("{}/none/last", "no whole checkpoint in .*none; --ckpt_path auto starts"),
            ("{}/empty/best", "no such checkpoint"),
            ("\0", "no such checkpoint"),
        ):
            with pytest.raises(UserError, match=f"^ckpt_path.*{reason}") as caught:
                resolve(text.format(folder), folder)
            assert "\n" not in str(caught.value)


class TestPrune:
    @pytest.fixture
    def many(self, tmp_path, made):
        """Written in this order: a run went back to step 2."""
        for name in ("step=1", "step=4", "step=3", "step=2"):
            write_checkpoint(tmp_path / name, made())
        return tmp_path

    @pytest.mark.parametrize(
        ("limit", "keep", "left"),
        [
            (1, None, ["step=2"]),
            (2, None, ["step=2", "step=3"]),
            (1, "step=1", ["step=1", "step=2"]),
            (2, "step=2", ["step=2", "step=3", "step=4"]),
            (9, None, ["step=1", "step=2", "step=3", "step=4"]),
        ],
    )
    def test_the_oldest_go(self, many, limit, keep, left):
        """What is kept may be named by a link."""
        if keep:
            point(many, "best", many / keep)
        prune(many, limit, keep and many / "best")
        assert names(many) == ["best"] * bool(keep) + left

    def test_only_ours_go(self, many, made):
        write_checkpoint(many / "epoch=0-step=4.ckpt", made())
        (many / "step=9").mkdir()
        (many / "step=8.ckpt").write_text("of an earlier version")
        (many / "step=4" / CHECKSUMS).write_text("damaged")
        prune(many, 1)
        assert names(many) == ["epoch=0-step=4.ckpt", "step=2", "step=4", "step=8.ckpt", "step=9"]


class TestPoint:
    def test_a_relative_link(self, folder, monkeypatch):
        monkeypatch.chdir(folder.parent)
        for there in (Path("checkpoints"), folder):
            for name in ("step=3", "step=5"):
                point(there, "last", there / name)
                assert os.readlink(folder / "last") == name
        assert names(folder) == ["last", "step=3", "step=5"]
        folder.rename(folder.parent / "moved")
        assert (folder.parent / "moved" / "last" / CHECKSUMS).is_file()

    def test_a_folder_of_that_name_is_not_lost(self, folder, made):
        """But a copy of the folder that followed the links has whole checkpoints there."""
        shutil.copytree(folder / "step=5", folder / "last")
        point(folder, "last", folder / "step=5")
        assert os.readlink(folder / "last") == "step=5"
        write_checkpoint(folder / "best", made(9))
        (folder / "mine").mkdir()
        for name in ("best", "mine"):
            with pytest.raises(UserError, match="is a folder, and would be replaced by a link"):
                point(folder, name, folder / "step=5")


def test_tidy(folder, made):
    write_checkpoint(folder / ".step=9.partial", made(9))
    write_checkpoint(folder / ".step=5.replaced", made(9))
    (folder / "step=3").rename(folder / ".step=3.replaced")
    (folder / ".last.partial").symlink_to("step=5")
    (folder / ".hidden").write_text("of the user")
    (folder / "x.partial").write_text("of the user")
    tidy_leftovers(folder)
    tidy_leftovers(folder / "none")
    assert names(folder) == [".hidden", "step=3", "step=5", "x.partial"]
