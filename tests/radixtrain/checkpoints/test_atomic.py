"""A folder is replaced so that a kill at any moment leaves the old one or the new one."""

import os
import sys

import pytest

from radixtrain.checkpoints import atomic
from radixtrain.checkpoints.atomic import current_path, recover, remove, tidy_leftovers, writing
from tests.support import FULL
from tests.support.runs import kills_at_file_operations, names


@pytest.fixture(params=["exchanged", pytest.param("renamed twice", marks=FULL)])
def how(request, monkeypatch):
    """As on Linux, and as on disks that cannot exchange two names."""
    if request.param == "renamed twice":
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    return request.param


def replace(target, text):
    with writing(target) as staging:
        (staging / "deep").mkdir()
        (staging / "deep" / "file").write_text(text)


def content(target):
    return (target / "deep" / "file").read_text()


def test_new_and_replaced(tmp_path, how):
    for text in ("old", "new"):
        replace(tmp_path / "new folder" / "x", text)
        assert content(tmp_path / "new folder" / "x") == text
    assert names(tmp_path / "new folder") == ["x"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has renameat2")
def test_this_system_exchanges_two_names(tmp_path):
    """So that nothing is absent for a moment. It is what Linux and its usual disks can."""
    for name in ("a", "b"):
        replace(tmp_path / name, name)
    assert atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path / "a") == "b" and content(tmp_path / "b") == "a"
    with pytest.raises(FileNotFoundError):
        atomic._exchange(tmp_path / "a", tmp_path / "none")


@pytest.mark.parametrize("there", ["a file", "a link", "a link to nothing"])
def test_whatever_has_the_name_is_replaced(tmp_path, how, there):
    target = tmp_path / "x"
    replace(tmp_path / "other", "other")
    target.write_text("a file") if there == "a file" else target.symlink_to("other" if there == "a link" else "nothing")
    replace(target, "new")
    assert content(target) == "new" and not target.is_symlink() and content(tmp_path / "other") == "other"
    assert names(tmp_path) == ["other", "x"]


def test_a_failure_leaves_the_old_one_and_nothing_else(tmp_path, how):
    """Also if a write that was killed had left something."""
    replace(tmp_path / ".x.replaced", "old")
    replace(tmp_path / ".x.partial", "half")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), writing(tmp_path / "x") as staging:
            (staging / "half").write_text("half")
            raise error
        assert content(tmp_path / "x") == "old" and names(tmp_path) == ["x"]


def test_removed(tmp_path):
    replace(tmp_path / "x", "old")
    (tmp_path / "link").symlink_to("x")
    for name in ("link", "x", "x", "never there"):
        remove(tmp_path / name)
    assert names(tmp_path) == []


def test_killed_while_it_replaces(tmp_path, how):
    replace(tmp_path / "x", "old")
    for _ in kills_at_file_operations(lambda: replace(tmp_path / "x", "new")):
        now = content(current_path(tmp_path / "x"))
        assert now in ("old", "new")
        tidy_leftovers(tmp_path)
        assert names(tmp_path) == ["x"] and content(tmp_path / "x") == now
        replace(tmp_path / "x", "old")


@FULL
def test_killed_while_it_is_written_anew(tmp_path):
    for _ in kills_at_file_operations(lambda: replace(tmp_path / "x", "new")):
        assert not (tmp_path / "x").exists() or content(tmp_path / "x") == "new"
        tidy_leftovers(tmp_path)
        remove(tmp_path / "x")
        assert names(tmp_path) == []


@FULL
def test_killed_while_it_is_removed(tmp_path):
    replace(tmp_path / "x", "old")
    for _ in kills_at_file_operations(lambda: [remove(tmp_path / "x"), list(os.scandir(tmp_path))]):
        assert not (tmp_path / "x").exists() or content(tmp_path / "x") == "old"
        tidy_leftovers(tmp_path)
        replace(tmp_path / "x", "old")


@FULL
def test_killed_while_it_is_tidied(tmp_path):
    def leave_a_mess():
        remove(tmp_path / "y")
        for name in ("x", ".x.replaced", ".y.replaced", ".z.partial"):
            replace(tmp_path / name, f"of {name}")

    leave_a_mess()
    for _ in kills_at_file_operations(lambda: tidy_leftovers(tmp_path)):
        tidy_leftovers(tmp_path)
        assert names(tmp_path) == ["x", "y"]
        assert content(tmp_path / "x") == "of x" and content(tmp_path / "y") == "of .y.replaced"
        leave_a_mess()


def test_the_previous_one_counts_while_the_target_is_absent(tmp_path):
    replace(tmp_path / ".x.replaced", "old")
    assert content(current_path(tmp_path / "x")) == "old"
    recover(tmp_path / "x")
    assert content(tmp_path / "x") == "old" and names(tmp_path) == ["x"]
    replace(tmp_path / ".x.replaced", "older")
    recover(tmp_path / "x")
    assert content(current_path(tmp_path / "x")) == "old"
