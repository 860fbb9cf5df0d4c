"""What is refused before a row is read."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from radixtrain.commands import preflight
from radixtrain.commands.preflight import check_room, num_stored_parameters
from radixtrain.errors import UserError

LENGTH = b"\x02\0\0\0\0\0\0\0"  # of the header
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    return tmp_path


def sharded(folder, *names):
    weight_map = {f"w{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class TestWeights:
    def test_they_are_counted_by_their_headers(self, folder):
        assert num_stored_parameters(str(folder)) == 22
        save_file({"c": torch.zeros(2, 2)}, folder / "one.safetensors")
        (folder / "model.safetensors").rename(folder / "two.safetensors")
        assert num_stored_parameters(str(sharded(folder, "one.safetensors", "two.safetensors"))) == 26

    def test_a_missing_shard(self, tmp_path):
        save_file({"c": torch.zeros(2, 2)}, tmp_path / "one.safetensors")
        sharded(tmp_path, "one.safetensors", "two.safetensors", "three.safetensors")
        with pytest.raises(
            UserError, match=r"2 of 3 files of the weights are missing, three\.safetensors is the first"
        ):
            num_stored_parameters(str(tmp_path))

    def test_a_file_that_is_damaged(self, folder):
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        for content in (*(whole[:-cut] for cut in (1, 60, 200)), b"", b"abc", b"\xff" * 100, LENGTH + b"[]"):
            path.write_bytes(content)
            with pytest.raises(UserError, match=f"^{path}: the weights cannot be read, the file is incomplete or dam"):
                num_stored_parameters(str(folder))

    def test_another_format(self, tmp_path):
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(UserError, match=r"no weights .*; pytorch_model\.bin is of another format: convert it"):
            num_stored_parameters(str(tmp_path))

    def test_a_folder_with_only_an_adapter(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        assert num_stored_parameters(str(tmp_path)) is None

    def test_a_name_that_was_never_downloaded(self, monkeypatch):
        monkeypatch.setattr(preflight.constants, "HF_HUB_OFFLINE", True)
        for name in ("nobody/nothing", "nothing"):
            with pytest.raises(UserError, match="no downloaded weights of that name, and HF_HUB_OFFLINE forbids"):
                num_stored_parameters(name)
        monkeypatch.setattr(preflight.constants, "HF_HUB_OFFLINE", False)
        assert num_stored_parameters("nobody/nothing") is None

    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(UserError, match=f"^model.model_name_or_path: no such folder: {tmp_path / 'x'}$"):
            num_stored_parameters(str(tmp_path / "x"))


class TestRoom:
    FULL = SimpleNamespace(dtype="float32", use_peft=False, optimizer="adamw")
    MUON = SimpleNamespace(dtype="float32", use_peft=False, optimizer="muon")
    IN_8_BITS = SimpleNamespace(dtype="bfloat16", use_peft=False, optimizer="adamw_8bit")
    LORA = SimpleNamespace(dtype="bfloat16", use_peft=True, optimizer="adamw")

    @pytest.mark.parametrize(
        ("settings", "copies", "needed"),
        [
            *((FULL, 3, 4000 * 10), (FULL, 0, 4000), (LORA, 3, 2000)),
            *((MUON, 3, 4000 * 7), (IN_8_BITS, 3, 2000 * 7)),
        ],
    )
    def test_what_a_run_writes(self, tmp_path, settings, copies, needed):
        assert check_room(tmp_path / "a" / "b", 1000, settings, copies) == needed
        assert not (tmp_path / "a").exists()

    def test_a_full_disk(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 << 30, 1 << 30, 1 << 30))
        said = r"at least 2\.61 GiB, a model and 2 checkpoints of about 1\.12 GiB, and 1 GiB are free"
        with pytest.raises(UserError, match=said):
            check_room(tmp_path, 10**8, self.FULL, 2)
        check_room(tmp_path, None, self.FULL, 2)


def test_weights_that_this_user_may_not_read(tmp_path, monkeypatch):
    """The reason is named: safetensors says that there is no such file."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        UserError, match=r"model\.safetensors: the weights cannot be read: Permission denied; let this user"
    ):
        num_stored_parameters(str(tmp_path))
