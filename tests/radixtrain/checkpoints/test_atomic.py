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


@pytest.mark.parametrize(
    ("before", "after"),
    [("old", "new"), pytest.param(None, "new", marks=FULL), pytest.param("old", None, marks=FULL)],
)
def test_killed_while_it_is_replaced_written_anew_or_removed(tmp_path, how, before, after):
    def change(text):
        remove(tmp_path / "x") if text is None else replace(tmp_path / "x", text)

    def found():
        path = current_path(tmp_path / "x")
        return content(path) if path.exists() else None

    change(before)
    for _ in kills_at_file_operations(lambda: [change(after), list(os.scandir(tmp_path))]):
        now = found()
        assert now in (before, after)
        tidy_leftovers(tmp_path)
        assert found() == now and names(tmp_path) == ["x"] * (now is not None)
        change(before)


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
