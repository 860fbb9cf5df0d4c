"""The folder that a model is written to: replaced as a whole, and only if that loses nothing else. Checkpoints last."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.training.checkpoint import check_model_folder, save_hf_folder

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "before_the_moves"
ROUNDING = 1e-5  # relative; another CPU sums in another order. With Adam's step count off by one it is 2e-3


@pytest.fixture
def parts(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model"), AutoTokenizer.from_pretrained(shop / "model")


def test_a_previous_model_is_replaced(parts, tmp_path):
    for _ in range(2):
        save_hf_folder(*parts, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_files_are_never_lost(parts, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"holds what is no model \(thesis\.tex\)"):
        save_hf_folder(*parts, tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("name", ["results.json", "notes.txt", "thesis.md", "run1.safetensors"])
def test_files_of_ones_own_beside_a_model_are_never_lost(parts, tmp_path, name):
    save_hf_folder(*parts, tmp_path / "model")
    (tmp_path / "model" / name).write_text("years")
    with pytest.raises(UserError, match="holds what is no model"):
        save_hf_folder(*parts, tmp_path / "model")
    assert (tmp_path / "model" / name).read_text() == "years"


def test_what_is_read_is_not_replaced(shop):
    with pytest.raises(UserError, match="is read from there"):
        check_model_folder(shop / "model", [shop / "model"])


def test_a_run_killed_between_the_renames_loses_nothing(parts, tmp_path):
    save_hf_folder(*parts, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.replaced")
    with pytest.raises(ZeroDivisionError):
        save_hf_folder(parts[0], Failing(), tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_fit_does_not_overwrite_its_own_base(arguments, shop, tmp_path, parts, capsys):
    save_hf_folder(*parts, tmp_path / "out" / "model")
    base = tmp_path / "out" / "model"
    assert main(arguments(model__model_name_or_path=base)) == 1
    assert "is read from there; choose another" in capsys.readouterr().err


class Failing:
    def save_pretrained(self, folder):
        raise ZeroDivisionError


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """The folder of a run that the code wrote before its modules moved, as the working directory."""
    monkeypatch.chdir(shutil.copytree(GOLDEN, tmp_path / "old"))
    return Path()


def test_an_old_run_is_resumed(old_run):
    """From its own configuration, to the losses and gradients that the old code has after resuming."""
    assert main(["fit", "--config=config.yaml", "--ckpt_path=step=5.ckpt", "--output_dir=resumed"]) == 0
    with (old_run / "resumed" / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    resumed = np.array([[float(row[name]) for name in ("step", "loss", "grad_norm")] for row in rows])
    expected = np.loadtxt(old_run / "losses.txt")
    assert (resumed[:, 0] == expected[:, 0]).all() and len(expected) == 7
    np.testing.assert_allclose(resumed[:, 1:], expected[:, 1:], rtol=ROUNDING)


def test_an_old_checkpoint_is_exported(old_run):
    assert main(["export", "--ckpt_path=step=5.ckpt", "--output_dir=exported"]) == 0
    exported = load_file(old_run / "exported" / "model.safetensors")
    saved = torch.load(old_run / "step=5.ckpt", weights_only=True)["state_dict"]
    assert [name for name in exported if not torch.equal(exported[name], saved[f"model.{name}"])] == []
    assert exported.keys() >= {name.removeprefix("model.") for name in saved} - {"lm_head.weight"}
