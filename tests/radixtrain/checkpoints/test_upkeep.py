"""How many checkpoints are kept, the links to them, and what killed writes leave."""

import os
from pathlib import Path

import pytest

from radixtrain.checkpoints.folder import write_checkpoint
from radixtrain.checkpoints.manifest import MANIFEST
from radixtrain.checkpoints.upkeep import point, prune, tidy
from radixtrain.errors import UserError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class TestPrune:
    @pytest.fixture
    def many(self, tmp_path, make_state):
        """Written in this order: a run went back to step 2."""
        for name in ("step=1", "step=4", "step=3", "step=2"):
            write_checkpoint(tmp_path / name, make_state())
        return tmp_path

    @pytest.mark.parametrize(
        ("limit", "keep", "left"),
        [
            (1, [], ["step=2"]),
            (2, [], ["step=2", "step=3"]),
            (1, ["step=1"], ["step=1", "step=2"]),
            (2, ["step=2"], ["step=2", "step=3", "step=4"]),
            (9, [], ["step=1", "step=2", "step=3", "step=4"]),
        ],
    )
    def test_the_oldest_go(self, many, limit, keep, left):
        prune(many, limit, [many / name for name in keep])
        assert names(many) == left

    def test_what_is_kept_may_be_named_by_a_link(self, many):
        point(many, "best", many / "step=1")
        prune(many, 1, [many / "best"])
        assert names(many) == ["best", "step=1", "step=2"]

    def test_only_ours_go(self, many, make_state):
        write_checkpoint(many / "epoch=0-step=4.ckpt", make_state())
        (many / "step=9").mkdir()
        (many / "step=8.ckpt").write_text("of an earlier version")
        (many / "step=4" / MANIFEST).write_text("damaged")
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
        assert (folder.parent / "moved" / "last" / MANIFEST).is_file()

    def test_a_file_where_there_are_no_links(self, folder, monkeypatch):
        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(Path, "symlink_to", refuse)
        point(folder, "last", folder / "step=5")
        assert (folder / "last").read_text() == "step=5\n"

    def test_a_folder_of_that_name_is_not_lost(self, folder):
        (folder / "last").mkdir()
        with pytest.raises(UserError, match="is a folder, and would be replaced by a link"):
            point(folder, "last", folder / "step=5")


def test_tidy(folder, make_state):
    write_checkpoint(folder / ".step=9.partial", make_state(9))
    write_checkpoint(folder / ".step=5.replaced", make_state(9))
    (folder / "step=3").rename(folder / ".step=3.replaced")
    (folder / ".last.partial").symlink_to("step=5")
    (folder / ".hidden").write_text("of the user")
    (folder / "x.partial").write_text("of the user")
    tidy(folder)
    tidy(folder / "none")
    assert names(folder) == [".hidden", "step=3", "step=5", "x.partial"]
