"""A checkpoint is written whole or not at all, whatever happens, and every changed byte of it is found."""

import errno
import json
import os
import random
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.checkpoints.atomic import remove, tidy_leftovers
from radixtrain.checkpoints.folder import (
    CHECKSUMS,
    FILES,
    MODEL,
    OPTIMIZER,
    RUN,
    SCHEMA,
    Checkpoint,
    DamagedCheckpoint,
    committed,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from radixtrain.checkpoints.resolve import newest_valid
from tests.support import TRIES
from tests.support.runs import a_run, assert_equal, forge, kills_at_calls, names, sign


def assert_holds(path, expected, moments=True):
    found = read_checkpoint(path, moments)
    assert_equal(found.weights, expected.weights, "weights")
    assert_equal(found.moments, expected.moments if moments else {}, "moments")
    assert found.run == {**found.run, **expected.run} and found.run.keys() == SCHEMA.keys()


def test_a_checkpoint_comes_back(tmp_path, made):
    path = tmp_path / "new" / "step=3"
    write_checkpoint(path, made())
    assert names(tmp_path / "new") == ["step=3"] and names(path) == sorted((CHECKSUMS, *FILES))
    assert_holds(path, made())
    assert_holds(path, made(), moments=False)


def test_which_is_the_newest(folder, made):
    write_checkpoint(folder / "step=3", made(7))  # replaced, as after going back to an earlier step
    found = [(run["sequence"], run["step"], path.name) for run, path in committed(folder)]
    assert found == [(3, 7, "step=3"), (2, 5, "step=5")]
    assert_holds(folder / "step=3", made(7))
    assert names(folder) == ["step=3", "step=5"]


class TestDamage:
    """It is found and named, and the older checkpoint is taken."""

    def check(self, folder, file, match=None):
        with pytest.raises(DamagedCheckpoint, match=match) as caught:
            verify_checkpoint(folder / "step=5")
        assert str(folder / "step=5") in str(caught.value) and file in str(caught.value)
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(folder / "step=5")
        choice = newest_valid(folder)
        assert choice.path == folder / "step=3"
        (line,) = choice.passed_over
        assert file in line and "step=5" in line

    @pytest.mark.parametrize("file", [CHECKSUMS, *FILES])
    def test_of_every_file(self, folder, file):
        """Flipped bits, a beginning of it, more than the file, that of another, and something else of its name."""
        path = folder / "step=5" / file
        whole, places = path.read_bytes(), random.Random(file)
        cut = [whole[:left] for left in (0, 1, len(whole) // 2, len(whole) - 1)]
        for data in (*cut, whole + b"\n", (folder / "step=3" / file).read_bytes()):
            path.write_bytes(data)
            self.check(folder, file)
        for _ in range(2 * TRIES):
            changed = bytearray(whole)
            changed[places.randrange(len(changed))] ^= 1 << places.randrange(8)
            path.write_bytes(changed)
            self.check(folder, file)
        path.unlink()
        self.check(folder, file, "is missing")
        path.mkdir()
        self.check(folder, file, "cannot be read")
        path.rmdir()
        path.symlink_to(path.name)  # a loop
        self.check(folder, file, "cannot be read")
        path.unlink()
        path.write_bytes(whole)
        verify_checkpoint(folder / "step=5")

    def test_a_file_more_is_not_read(self, folder, made):
        (folder / "step=5" / "pickle.pt").write_bytes(b"\x80")
        assert_holds(folder / "step=5", made(5))

    def test_of_a_later_version(self, folder):
        forge(folder / "step=5", ("format",), 2)
        self.check(folder, RUN, "not of format 1: another version of radixtrain")

    @pytest.mark.parametrize("key", [key for key in SCHEMA if key != "format"])
    def test_an_entry_of_another_kind(self, folder, key):
        forge(folder / "step=5", (key,), 0.5)
        self.check(folder, RUN, f"its {key} is not as radixtrain writes it")

    def test_a_file_elsewhere(self, folder):
        sums = folder / "step=5" / CHECKSUMS
        sums.write_text(sums.read_text().replace(MODEL, f"../step=3/{MODEL}"))
        self.check(folder, CHECKSUMS)


BYTES = st.binary(max_size=60)
ANY = {
    CHECKSUMS: BYTES | st.lists(st.sampled_from([*FILES, "0" * 32, "  ", "\n"])).map(lambda all: "".join(all).encode()),
    RUN: BYTES | st.sampled_from([b"[" * 99_999, b"1" * 5000, b'{"format": 1e999}', b"null", b'{"format": 1}']),
    **dict.fromkeys((MODEL, OPTIMIZER), BYTES | BYTES.map(lambda text: len(text).to_bytes(8, "little") + text)),
}


@pytest.mark.parametrize("file", ANY)
@settings(max_examples=3 * TRIES, deadline=None)
@given(st.data())
def test_whatever_somebody_put_there(tmp_path_factory, file, data):
    """DamagedCheckpoint and nothing else, also if the checksums are right."""
    path = tmp_path_factory.mktemp("fuzz") / "step=1"
    write_checkpoint(path, Checkpoint({"x": torch.ones(3)}, {}, a_run()))
    (path / file).write_bytes(data.draw(ANY[file]))
    if file != CHECKSUMS:
        sign(path)
    with pytest.raises(DamagedCheckpoint, match=file):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["fresh", "replacing"])
def test_killed_anywhere(kind, tmp_path, made):
    """In the middle of a write: the old one or the new one, and nothing half-written."""
    states = {step: made(step, size=300) for step in (1, 2, 3)}
    sums = {}
    for step in (3, 2, 1):
        write_checkpoint(tmp_path / f"step={step}", states[step])
        sums[step] = (tmp_path / f"step={step}" / CHECKSUMS).read_text().splitlines()[:2]
    remove(tmp_path / "step=3")
    target, usual = ("step=2", ["step=1", "step=2"]) if kind == "replacing" else ("step=3", ["step=1", "step=2"])
    for _ in kills_at_calls(lambda: write_checkpoint(tmp_path / target, states[3]), number=25):
        choice = newest_valid(tmp_path)
        assert choice.path is not None and not choice.passed_over
        tidy_leftovers(tmp_path)
        assert names(tmp_path) in (usual, sorted({*usual, target}))
        for path in tmp_path.iterdir():
            verify_checkpoint(path)
            assert (path / CHECKSUMS).read_text().splitlines()[:2] in sums.values()
        remove(tmp_path / target)
        if kind == "replacing":
            write_checkpoint(tmp_path / target, states[2])


def test_nothing_goes_through_the_folder_of_temporary_files(tmp_path, made, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    write_checkpoint(tmp_path / "step=3", made())
    assert names(tmp_path) == ["step=3"]


@pytest.mark.parametrize("name", ["step=5", "step=9"])
def test_a_write_that_fails_leaves_nothing(folder, name, made, monkeypatch):
    """A limit of the shell, while tensors are written, and a disk that is full at the end."""
    with file_size(100_000), pytest.raises(OSError, match="File too large"):
        write_checkpoint(folder / name, made(9, size=600))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(folder / name, made(9))
    assert names(folder) == ["step=3", "step=5"]
    assert_holds(folder / "step=5", made(5))


@contextmanager
def file_size(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_paths_are_text_and_nothing_else_is_held(folder):
    write_checkpoint(folder / "step=9", Checkpoint({}, {}, a_run(data={"train_file": Path("a/b")})))
    assert json.loads((folder / "step=9" / RUN).read_text())["data"] == {"train_file": "a/b"}
    with pytest.raises(TypeError):
        write_checkpoint(folder / "step=10", Checkpoint({}, {}, a_run(record={"Mine": len})))
    assert names(folder) == ["step=3", "step=5", "step=9"]
