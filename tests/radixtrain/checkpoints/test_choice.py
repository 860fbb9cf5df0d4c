"""The newest whole checkpoint, and everything that `--ckpt_path` may name."""

import logging
import os
import shutil
from pathlib import Path

import pytest
from tiers import FULL

from radixtrain.checkpoints.choice import Choice, newest_valid, resolve
from radixtrain.checkpoints.folder import read_checkpoint, write_checkpoint
from radixtrain.checkpoints.manifest import MANIFEST, SKELETON
from radixtrain.checkpoints.packing import MODEL
from radixtrain.checkpoints.upkeep import point
from radixtrain.errors import UserError

OLD = Path(__file__).resolve().parents[2] / "golden" / "before_the_moves" / "step=5.ckpt"


def damage(path):
    with (path / MODEL).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xaa")


class TestNewest:
    def test_is_the_last_one_written_whatever_its_name(self, folder, make_state):
        assert newest_valid(folder) == Choice(folder / "step=5", [])
        write_checkpoint(folder / "step=4", make_state(4))  # as after going back to an earlier step
        os.utime(folder / "step=4", (0, 0))
        assert newest_valid(folder).path == folder / "step=4"
        write_checkpoint(folder / "my best.ckpt", make_state(4))
        assert newest_valid(folder).path == folder / "my best.ckpt"

    def test_damaged_ones_are_named(self, folder, make_state):
        write_checkpoint(folder / "step=7", make_state(7))
        damage(folder / "step=7")
        (folder / "step=5" / MANIFEST).unlink()
        choice = newest_valid(folder)
        assert choice.path == folder / "step=3"
        assert sorted(line.removeprefix(f"{folder}/") for line in choice.passed_over) == [
            "step=5: manifest.json is missing: it was not written to its end",
            "step=7: model.safetensors is damaged: its checksum is not the one in the manifest",
        ]
        damage(folder / "step=3")
        choice = newest_valid(folder)
        assert choice.path is None and len(choice.passed_over) == 3

    def test_none_is_there(self, tmp_path):
        (tmp_path / "folder" / "logs").mkdir(parents=True)
        assert newest_valid(tmp_path / "folder") == newest_valid(tmp_path / "none") == Choice(None, [])

    def test_what_is_being_written_is_none_and_links_are_none(self, folder, make_state):
        write_checkpoint(folder / ".step=9.partial", make_state(9))
        point(folder, "last", folder / "step=3")
        (folder / "nowhere").symlink_to("nothing")
        assert newest_valid(folder) == Choice(folder / "step=5", [])

    def test_one_that_was_being_replaced_counts(self, folder):
        (folder / "step=5").rename(folder / ".step=5.replaced")
        assert newest_valid(folder) == Choice(folder / ".step=5.replaced", [])
        assert resolve(str(folder / "step=5"), folder) == folder / ".step=5.replaced"

    @FULL
    def test_files_of_earlier_versions_come_last(self, folder):
        for age, name in enumerate(["b.ckpt", "a.ckpt"]):
            shutil.copy(OLD, folder / name)
            os.utime(folder / name, (1e9 - age, 1e9 - age))
        assert newest_valid(folder).path == folder / "step=5"
        for step in (3, 5):
            shutil.rmtree(folder / f"step={step}")
        assert newest_valid(folder) == Choice(folder / "b.ckpt", [])
        assert resolve(str(folder / "a.ckpt"), folder) == folder / "a.ckpt"
        (folder / "b.ckpt").write_bytes(OLD.read_bytes()[:-100])  # and so the newest
        choice = newest_valid(folder)
        assert choice.path == folder / "a.ckpt" and "b.ckpt: the file is damaged" in choice.passed_over[0]


class TestResolve:
    @pytest.fixture(autouse=True)
    def links(self, folder):
        point(folder, "last", folder / "step=5")
        point(folder, "best", folder / "step=3")

    @pytest.mark.parametrize("is_relative", [True, False])
    def test_names(self, folder, is_relative, monkeypatch):
        monkeypatch.chdir(folder.parent)
        there = Path("checkpoints") if is_relative else folder
        for text, name in (
            *(("last", "step=5"), ("best", "step=3"), ("{}/last", "step=5"), ("{}/best", "step=3"), ("{}", "step=5")),
            *(("{}/step=3", "step=3"), ("{}/step=3/", "step=3"), ("{}/..", "step=5")),
        ):
            assert resolve(text.format(there), there).resolve() == folder / name, text

    def test_last_is_the_newest_whatever_the_link_says(self, folder, make_state):
        write_checkpoint(folder / "step=9", make_state(9))
        assert resolve("last", folder) == resolve(str(folder / "last"), Path()) == folder / "step=9"
        (folder / "last").unlink()
        assert resolve("last", folder) == resolve(str(folder / "last"), Path()) == folder / "step=9"

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

    def test_a_link_as_a_file(self, folder):
        for name in ("best", "last"):
            (folder / name).unlink()
            (folder / name).write_text("step=3\n")
        assert resolve("best", folder) == folder / "step=3"
        assert resolve(str(folder / "last"), folder) == folder / "step=5"

    def test_none_is_there(self, folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / MODEL).write_text("x")
        (folder / "empty").mkdir()
        (folder / "text").write_text("hello")
        for text, reason in (
            ("{}/step=4", "no such checkpoint: .*step=4; .*step=5 is whole"),
            ("nope.ckpt", "no such checkpoint: nope.ckpt$"),
            ("{}/step=5/model.safetensors", "not a checkpoint of radixtrain"),
            ("{}/model", "a model and no checkpoint; give it as model.model_name_or_path"),
            ("{}/empty", "no whole checkpoint in .*empty$"),
            ("{}/empty/last", "no whole checkpoint in .*empty$"),
            ("{}/none/last", "no whole checkpoint in .*none$"),
            ("{}/empty/best", "no such checkpoint"),
            ("{}/text", "not a checkpoint of radixtrain"),
            ("\0", "no such checkpoint"),
        ):
            with pytest.raises(UserError, match=f"^ckpt_path.*{reason}") as caught:
                resolve(text.format(folder), folder)
            assert "\n" not in str(caught.value)
        shutil.rmtree(folder / "step=3")  # where the link `best` leads
        with pytest.raises(UserError, match=r"ckpt_path best: none in .*save_best.*; .*step=5 is whole"):
            resolve("best", folder)
        with pytest.raises(UserError, match="no such checkpoint"):
            read_checkpoint(folder / "step=4")

    def test_all_are_damaged(self, folder):
        damage(folder / "step=5")
        (folder / "step=3" / SKELETON).unlink()
        with pytest.raises(
            UserError, match=r"no whole checkpoint in .*step=5: model.*; .*step=3: state\.json is missing"
        ):
            resolve("last", folder)
