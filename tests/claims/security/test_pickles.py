"""A pickle runs what its author wrote. None is read: not as a checkpoint, as weights, as a tokenizer, nor as data."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import CHECKSUMS, FILES, Checkpoint, read_checkpoint, write_checkpoint
from radixtrain.data.files.sources import read_rows
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.training.start.loading import load_model
from tests.support import cases
from tests.support.runs import a_run, sign

KINDS = ["pt", "pth", "pkl", "pickle", "joblib", "npy", "ckpt", "bin", "parquet", "arrow", "jsonl", "json", "csv"]


class Bomb:
    """Says that it was run: whoever unpickles it writes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def folder(shop: Path, tmp_path: Path) -> Path:
    """Of a model."""
    return Path(shutil.copytree(shop / "model", tmp_path / "model"))


def saved(path: Path, mark: Path, zipped: bool = True) -> Path:
    """A checkpoint of torch's format with a bomb among the settings of the optimizer."""
    state = {"state_dict": {"w": torch.ones(3)}, "optimizer_states": [{"state": Bomb(mark)}]}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    return path


def test_the_bomb_works(tmp_path: Path, mark: Path) -> None:
    torch.load(saved(tmp_path / "a.ckpt", mark), weights_only=False)
    assert mark.exists()


def test_a_file_of_a_checkpoint(tmp_path: Path, mark: Path) -> None:
    for name in (CHECKSUMS, *FILES):
        folder = tmp_path / name / "step=1"
        write_checkpoint(folder, Checkpoint({"w": torch.ones(3)}, {"w.exp_avg": torch.ones(3)}, a_run()))
        saved(folder / name, mark)
        if name != CHECKSUMS:
            sign(folder)
        with pytest.raises(UserError, match=name):
            read_checkpoint(folder)
        assert not mark.exists(), name


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "adapter_model.bin"])
def test_weights(name: str, folder: Path, mark: Path) -> None:
    if name != "adapter_model.bin":
        (folder / "model.safetensors").unlink()
    else:
        settings = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    saved(folder / name, mark)
    said = r"no file named model\.safetensors" if name == "pytorch_model.bin" else None
    with pytest.raises(UserError, match=said):
        load_model(str(folder), "float32", "sdpa")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.pkl"])
def test_a_tokenizer(name: str, folder: Path, mark: Path) -> None:
    if name in ("tokenizer.model", "vocab.pkl"):
        (folder / "tokenizer.json").unlink()
    saved(folder / name, mark)
    with pytest.raises(UserError):
        load_tokenizer(str(folder))
    assert not mark.exists()


def test_data(tmp_path: Path, mark: Path) -> None:
    for kind in KINDS:
        path = saved(tmp_path / f"a.{kind}", mark)
        with pytest.raises(UserError):
            list(read_rows(path))
        assert not mark.exists(), kind


def test_a_saved_data_set(tmp_path: Path, mark: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="saved data sets: pip install datasets")
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        folder = tmp_path / name
        datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(folder)
        saved(folder / name, mark)
        with pytest.raises(UserError):
            list(read_rows(folder))
        assert not mark.exists(), name


@pytest.mark.parametrize("command", cases(["fit", "validate", "export"], ["fit"]))
def test_no_command_runs_it(command: str, arguments: Any, tmp_path: Path, mark: Path, capsys: Any) -> None:
    """A file of this torch, of an old one, and a plain pickle."""
    paths = [saved(tmp_path / f"{zipped}.ckpt", mark, zipped) for zipped in (True, False)]
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Bomb(mark)))
    given = ["export", f"--output_dir={tmp_path / 'model'}"] if command == "export" else arguments(command)
    for path in (*paths, tmp_path / "plain.ckpt"):
        assert main([*given, f"--ckpt_path={path}"]) == 1
        assert "Traceback" not in (said := capsys.readouterr().err) and "error: " in said
        assert not mark.exists()
