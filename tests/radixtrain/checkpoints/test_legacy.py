"""`.ckpt` files of earlier versions are read, and no code in them runs."""

import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from tiers import FULL

from radixtrain.checkpoints.folder import read_checkpoint, verify_checkpoint
from radixtrain.checkpoints.manifest import DamagedCheckpoint

pytestmark = FULL
OLD = Path(__file__).resolve().parents[2] / "golden" / "before_the_moves" / "step=5.ckpt"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_old_file_is_read():
    state = read_checkpoint(OLD)
    assert state["global_step"] == 5 and len(state["state_dict"]) == 14
    assert state["optimizer_states"][0]["state"][0]["exp_avg"].shape == (20, 16)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_bomb_does_not_go_off(tmp_path, is_zip):
    bomb = {"state_dict": {}, "hyper_parameters": Bomb(tmp_path / "boom")}
    torch.save(bomb, tmp_path / "x.ckpt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(DamagedCheckpoint, match="no code in a checkpoint is run" if is_zip else "is no checkpoint"):
        read_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "boom").exists()
    torch.load(tmp_path / "x.ckpt", weights_only=False)
    assert (tmp_path / "boom").exists()  # it was one


def test_a_bare_pickle_does_not_go_off(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    with zipfile.ZipFile(tmp_path / "y.ckpt", "w") as archive:
        archive.writestr("y/data.pkl", pickle.dumps(Bomb(tmp_path / "boom")))
    for name in ("x.ckpt", "y.ckpt"):
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(tmp_path / name)
    assert not (tmp_path / "boom").exists()


def test_a_flipped_bit_in_a_number_is_found(tmp_path):
    whole, places = OLD.read_bytes(), random.Random(1)
    with zipfile.ZipFile(OLD) as archive:
        inside = [each for each in archive.infolist() if "/data/" in each.filename and each.file_size > 1000]
    for _ in range(100):
        entry = places.choice(inside)
        start = whole.index(entry.filename.encode(), entry.header_offset) + 200  # after the header and its padding
        changed = bytearray(whole)
        changed[start + places.randrange(entry.file_size - 200)] ^= 1 << places.randrange(8)
        (tmp_path / "x.ckpt").write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            verify_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("data", [b"", b"PK, but no zip file", OLD.read_bytes()[:-1], OLD.read_bytes()[:5000]])
def test_what_is_no_checkpoint(tmp_path, data):
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="was not written to its end, or is no checkpoint"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_another_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(DamagedCheckpoint, match="no file of torch"):
        read_checkpoint(tmp_path / "x.ckpt")
    torch.save([1], tmp_path / "y.ckpt")
    with pytest.raises(DamagedCheckpoint, match="no dictionary"):
        read_checkpoint(tmp_path / "y.ckpt")
