"""A checkpoint is written whole or not at all, whatever happens, and every changed byte of it is found."""

import errno
import json
import os
import random
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_in_a_fork import kills_at_calls
from outcomes import names
from tiers import TRIES

from radixtrain.checkpoints import folder as folders
from radixtrain.checkpoints.atomic import remove, tidy_leftovers
from radixtrain.checkpoints.folder import DamagedCheckpoint, read_checkpoint, verify_checkpoint, write_checkpoint
from radixtrain.checkpoints.manifest import FILES, MANIFEST, SKELETON, Manifest, committed
from radixtrain.checkpoints.packing import MODEL, STATE
from radixtrain.checkpoints.resolve import newest_valid
from radixtrain.checkpoints.tensors import digest_of_file, read_tensors
from radixtrain.errors import UserError


def test_a_state_comes_back(tmp_path, make_state, text_of, monkeypatch):
    write_checkpoint(tmp_path / "new" / "step=3", make_state())
    assert names(tmp_path / "new") == ["step=3"] and names(tmp_path / "new" / "step=3") == sorted((MANIFEST, *FILES))
    back = read_checkpoint(tmp_path / "new" / "step=3")
    assert text_of(back) == text_of(make_state())
    assert back["state_dict"]["embed"] is back["state_dict"]["head"]
    opened = []
    monkeypatch.setattr(
        folders, "read_tensors", lambda path, **given: opened.append(path.name) or read_tensors(path, **given)
    )
    rest = {name: value for name, value in make_state().items() if name != "optimizer_states"}
    assert text_of(read_checkpoint(tmp_path / "new" / "step=3", leave_out=["optimizer_states"])) == text_of(rest)
    assert opened == [MODEL, STATE]


def test_the_manifest_says_which_is_the_newest(folder, make_state, text_of):
    write_checkpoint(folder / "step=3", make_state(7))  # replaced, as after going back to an earlier step
    found = [(manifest.sequence, manifest.step, path.name) for manifest, path in committed(folder)]
    assert found == [(3, 7, "step=3"), (2, 5, "step=5")]
    assert text_of(read_checkpoint(folder / "step=3")) == text_of(make_state(7))
    assert names(folder) == ["step=3", "step=5"]


class TestDamage:
    """It is found and named, and the older checkpoint is taken."""

    def check(self, folder, file, match=None):
        with pytest.raises(DamagedCheckpoint, match=match) as caught:
            verify_checkpoint(folder / "step=5")
        assert caught.value.file == file and str(folder / "step=5") in str(caught.value) and file in str(caught.value)
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(folder / "step=5")
        choice = newest_valid(folder)
        assert choice.path == folder / "step=3"
        (line,) = choice.passed_over
        assert file in line and "step=5" in line

    @pytest.mark.parametrize("file", [MANIFEST, *FILES])
    def test_of_every_file(self, folder, file):
        """Flipped bits, a beginning of the file, more than the file, and something else of its name."""
        path = folder / "step=5" / file
        whole = path.read_bytes()
        places = random.Random(file)
        for _ in range(2 * TRIES):
            changed = bytearray(whole)
            changed[places.randrange(len(changed))] ^= 1 << places.randrange(8)
            path.write_bytes(changed)
            self.check(folder, file)
        for left in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:left])
            said = None if file == MANIFEST else rf"it has [\d,]+ bytes, and {len(whole):,} were written"
            self.check(folder, file, said)
        path.write_bytes(whole + b"\n")
        self.check(folder, file)
        path.unlink()
        self.check(folder, file)
        path.mkdir()
        self.check(folder, file)
        path.rmdir()
        path.symlink_to(path.name)  # a loop: it cannot be read
        self.check(folder, file)
        path.unlink()
        path.write_bytes(whole)
        verify_checkpoint(folder / "step=5")

    @pytest.mark.parametrize("file", [MANIFEST, MODEL, STATE, SKELETON])
    def test_a_file_of_another_checkpoint(self, folder, file):
        shutil.copy(folder / "step=3" / file, folder / "step=5" / file)
        self.check(folder, MODEL if file == MANIFEST else file)

    def test_a_file_more_is_not_read(self, folder, make_state, text_of):
        (folder / "step=5" / "notes.txt").write_text("a good one")
        (folder / "step=5" / "pickle.pt").write_bytes(b"\x80")
        assert text_of(read_checkpoint(folder / "step=5")) == text_of(make_state(5))

    def test_of_a_later_version(self, folder):
        path = folder / "step=5" / MANIFEST
        path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
        with pytest.raises(DamagedCheckpoint, match="another version than format 1: format 2"):
            verify_checkpoint(folder / "step=5")


def with_sums(path, **changed):
    """Change files of a checkpoint, and its manifest with them: damage that no checksum shows."""
    for name, data in changed.items():
        (path / name).write_bytes(data)
    sums = {name: digest_of_file(path / name) for name in FILES}
    (path / MANIFEST).write_bytes(Manifest(sequence=1, step=1, files=sums).to_bytes())


class TestFuzz:
    """Whatever somebody put there: DamagedCheckpoint and nothing else."""

    @pytest.fixture(scope="class")
    def checkpoint(self, tmp_path_factory):
        path = tmp_path_factory.mktemp("fuzz") / "step=1"
        write_checkpoint(path, {"x": torch.ones(3)})
        return path

    OF_THE_RIGHT_KEYS = st.fixed_dictionaries(
        {"format": st.just(1)},
        optional={
            name: st.none() | st.integers() | st.floats() | st.dictionaries(st.text(), st.none()) | st.text()
            for name in ("sequence", "step", "files", "checksum")
        },
    ).map(lambda body: json.dumps(body).encode())

    @settings(max_examples=8 * TRIES, deadline=None)
    @given(
        data=st.binary(max_size=60)
        | st.sampled_from([b"[" * 99_999, b"1" * 5000, b'{"format": 1e999}', b"null"])
        | OF_THE_RIGHT_KEYS
    )
    def test_manifest(self, checkpoint, data):
        (checkpoint / MANIFEST).write_bytes(data)
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(checkpoint)

    def test_a_manifest_that_names_a_file_elsewhere(self, folder):
        sums = {name: digest_of_file(folder / "step=5" / name) for name in FILES if name != MODEL}
        sums["../step=3/model.safetensors"] = digest_of_file(folder / "step=3" / MODEL)
        (folder / "step=5" / MANIFEST).write_bytes(Manifest(sequence=1, step=1, files=sums).to_bytes())
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(folder / "step=5")

    @settings(max_examples=2 * TRIES, deadline=None)
    @given(
        data=st.binary(max_size=60)
        | st.sampled_from([b"[" * 99_999, b"1", b'{"$tensor": 1}', b'{"x": {"$tensor": []}}'])
    )
    def test_skeleton(self, checkpoint, data):
        with_sums(checkpoint, **{SKELETON: data})
        with pytest.raises(DamagedCheckpoint, match=SKELETON):
            read_checkpoint(checkpoint)

    @settings(max_examples=2 * TRIES, deadline=None)
    @given(
        data=st.binary(max_size=60) | st.binary(max_size=30).map(lambda text: len(text).to_bytes(8, "little") + text)
    )
    def test_tensors(self, checkpoint, data):
        whole = (checkpoint / STATE).read_bytes()
        with_sums(checkpoint, **{STATE: data, SKELETON: b'{"x": 1}'})
        try:
            with pytest.raises(DamagedCheckpoint, match=STATE):
                read_checkpoint(checkpoint)
        finally:
            (checkpoint / STATE).write_bytes(whole)  # for the other tests, in whatever order they come


class TestKilled:
    """In the middle of a write: the old one or the new one, and nothing half-written."""

    @pytest.mark.parametrize("kind", ["fresh", "replacing"])
    def test_anywhere(self, kind, tmp_path, make_state):
        states = {step: make_state(step, size=300) for step in (1, 2, 3)}
        files = {}
        for step in (3, 2, 1):
            write_checkpoint(tmp_path / f"step={step}", states[step])
            files[step] = Manifest.read(tmp_path / f"step={step}").files
        remove(tmp_path / "step=3")
        target, usual = ("step=2", ["step=1", "step=2"]) if kind == "replacing" else ("step=3", ["step=1", "step=2"])
        for _ in kills_at_calls(lambda: write_checkpoint(tmp_path / target, states[3]), number=25):
            choice = newest_valid(tmp_path)
            assert choice.path is not None and not choice.passed_over
            tidy_leftovers(tmp_path)
            assert names(tmp_path) in (usual, sorted({*usual, target}))
            for path in tmp_path.iterdir():
                verify_checkpoint(path)
                assert Manifest.read(path).files in files.values()
            remove(tmp_path / target)
            if kind == "replacing":
                write_checkpoint(tmp_path / target, states[2])


def test_nothing_goes_through_the_folder_of_temporary_files(tmp_path, make_state, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    write_checkpoint(tmp_path / "step=3", make_state())
    assert names(tmp_path) == ["step=3"]


class TestFullDisk:
    """One line with the disk, the bytes, the last whole checkpoint and a way out; nothing is left of the new one."""

    def check(self, folder, path, reason, make_state, text_of, others=()):
        with pytest.raises(UserError, match=reason) as caught:
            write_checkpoint(path, make_state(9, size=600))
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        assert f"resume with --ckpt_path {folder / 'step=5'}, the last whole one" in str(caught.value)
        assert names(folder) == [*others, "step=3", "step=5"]
        assert text_of(read_checkpoint(folder / "step=5")) == text_of(make_state(5))

    @pytest.mark.parametrize("name", ["step=5", "step=9"])
    def test_is_seen_beforehand(self, folder, name, make_state, text_of, monkeypatch):
        usage = shutil.disk_usage(folder)._replace(free=2_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder.parent)
        reason = rf"it needs 3 MiB, and the disk at {folder.parent} has 2 MiB free; free some space there, then"
        self.check(folder, folder / name, reason, make_state, text_of)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_is_seen_while_waiting_for_the_disk(self, folder, number, make_state, text_of, monkeypatch):
        left = [3]

        def full(_):
            left[0] -= 1
            if left[0] < 2:
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", full)
        self.check(folder, folder / "step=5", "no room for the checkpoint", make_state, text_of)

    def test_a_limit_of_the_shell(self, folder, make_state, text_of):
        with file_size(100_000):
            self.check(folder, folder / "step=9", r"files may not become that large \(ulimit -f\)", make_state, text_of)

    def test_the_first_checkpoint(self, tmp_path, make_state):
        with (
            file_size(1000),
            pytest.raises(UserError, match="or set another output_dir, then start again: there is no"),
        ):
            write_checkpoint(tmp_path / "step=1", make_state(size=600))
        assert names(tmp_path) == []

    def test_a_folder_that_cannot_be_written(self, tmp_path, make_state):
        (tmp_path / "file").write_text("x")
        with pytest.raises(UserError, match="cannot be written: Not a directory"):
            write_checkpoint(tmp_path / "file" / "step=1", make_state())


@contextmanager
def file_size(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_state_that_cannot_be_held_leaves_nothing(folder):
    with pytest.raises(UserError, match="cannot hold callbacks"):
        write_checkpoint(folder / "step=9", {"callbacks": len})
    assert names(folder) == ["step=3", "step=5"]
